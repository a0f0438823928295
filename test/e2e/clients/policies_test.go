package clients

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// pieces of the objects that the policies judge.
const (
	team = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: NAME, labels: LABELS}\nspec:\n  replicas: 0\n" +
		"  selector: {matchLabels: {app: NAME}}\n  template:\n    metadata: {labels: {app: NAME}}\n" +
		"    spec: {containers: [{name: main, image: keelson.dev/hello:v1}]}\n"
	judged = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME, labels: LABELS}\nspec:\n  " +
		"terminationGracePeriodSeconds: 0\n  containers: [{name: main, image: IMAGE, resources: {limits: LIMITS}}]\n"
)

// F43: policies applied with kubectl refuse images of other registries, missing limits and missing
// labels, each with its message, by parameters that can change. A mutating policy adds a missing
// label. A conforming pod runs.
func TestPolicies(t *testing.T) {
	t.Parallel()
	ns := testenv.Namespace(t)
	raw, err := os.ReadFile("testdata/policies.yaml")
	if err != nil {
		t.Fatal(err)
	}
	policies := strings.ReplaceAll(string(raw), "TESTS_OWN", ns)
	programs := kubectlPrograms()
	newest := programs[len(programs)-1]
	testenv.Must(t, newest, "-n", ns, "apply", "-f", writeManifest(t, policies))
	t.Cleanup(func() { testenv.Kctl(t, "-n", ns, "delete", "-f", writeManifest(t, policies)) })
	if out := testenv.Must(t, newest, "-n", ns, "apply", "-f", writeManifest(t, policies)); strings.Contains(out,
		"configured") {
		t.Errorf("applied again:\n%s", out)
	}
	object := func(form, name, labels, image, limits string) string {
		return writeManifest(t,
			strings.NewReplacer("NAME", name, "LABELS", labels, "IMAGE", image, "LIMITS", limits).Replace(form))
	}
	denied := func(policy, words string) string {
		return fmt.Sprintf("ValidatingAdmissionPolicy '%s.%s' with binding '%s.%s' denied request: %s", policy, ns,
			policy, ns, words)
	}
	for _, program := range programs {
		for what, c := range map[string]struct{ file, want string }{
			"an image of another registry": {object(judged, "a", "{}", "docker.io/library/nginx:1", "{memory: 32Mi}"),
				denied("registry", "images come from keelson.dev/, not: docker.io/library/nginx:1")},
			"no limits": {object(judged, "b", "{}", "keelson.dev/hello:v1", "{}"),
				denied("limits", "all containers must have resource limits")},
			"a large one": {object(judged, "c", "{}", "keelson.dev/hello:v1", "{memory: 2Gi}"),
				denied("limits", "a container has less than 1Gi")},
			"no label": {object(team, "d", "{a: b}", "", ""), denied("labels", "every deployment names its team")},
		} {
			testenv.Eventually(t, soon, func() error {
				out, err := testenv.Try(t, program, "-n", ns, "apply", "--dry-run=server", "-f", c.file)
				if err == nil || !strings.Contains(out, c.want) {
					return fmt.Errorf("%s: %s: %v, want %q in\n%s", filepath.Base(program), what, err, c.want, out)
				}
				return nil
			})
		}
	}
	if out, err := tryKctl(t, ns, "apply", "-f", object(judged, "audited", "{}", "docker.io/library/nginx:1",
		"{memory: 32Mi}")); err == nil {
		t.Errorf("not refused:\n%s", out)
	}
	testenv.Eventually(t, soon, func() error {
		for _, line := range auditLines(t, "registry."+ns) {
			var e struct{ Annotations map[string]string }
			if json.Unmarshal(line, &e) == nil && e.Annotations["registry."+ns+"/foreign"] ==
				"docker.io/library/nginx:1" {
				return nil
			}
		}
		return errors.New("no audit record has the policy's annotation")
	})
	testenv.Kctl(t, "-n", ns, "apply", "-f", object(team, "named", "{team: kitchen}", "", ""))
	testenv.Eventually(t, soon, func() error { // from when every replica knows the policy that writes
		testenv.Kctl(t, "-n", ns, "apply", "-f", object(judged, "good", "{}", "keelson.dev/hello:v1", "{memory: 32Mi}"))
		if got := testenv.Kctl(t, "-n", ns, "get", "pod", "good", "-o", "jsonpath={.metadata.labels.team}"); got !=
			"nobody" {
			testenv.Kctl(t, "-n", ns, "delete", "pod", "good", "--timeout=180s")
			return fmt.Errorf("the label that is missing was written as %q", got)
		}
		return nil
	})
	testenv.Kctl(t, "-n", ns, "apply", "-f", object(judged, "mine", "{team: kitchen}", "keelson.dev/hello:v1",
		"{memory: 32Mi}"))
	testenv.Kctl(t, "-n", ns, "wait", "--for=condition=Ready", "pods", "good", "mine", "--timeout=180s")
	if got := testenv.Kctl(t, "-n", ns, "get", "pod", "mine", "-o", "jsonpath={.metadata.labels.team}"); got !=
		"kitchen" {
		t.Errorf("the label that was there became %q", got)
	}
	testenv.Kctl(t, "-n", ns, "patch", "configmap", "allowed", "--type=merge", "-p",
		`{"data":{"registry":"docker.io/"}}`)
	testenv.Eventually(t, soon, func() error {
		out, err := tryKctl(t, ns, "apply", "--dry-run=server", "-f",
			object(judged, "e", "{}", "keelson.dev/hello:v1", "{memory: 32Mi}"))
		if err == nil ||
			!strings.Contains(out, denied("registry", "images come from docker.io/, not: keelson.dev/hello:v1")) {
			return fmt.Errorf("with another parameter: %v\n%s", err, out)
		}
		return nil
	})
}
