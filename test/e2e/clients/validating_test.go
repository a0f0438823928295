package clients

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

func newConfigMap(name string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// createEventually creates a ConfigMap at a replica until cond accepts the result: the replica may
// not have received a configuration yet.
func createEventually(t testing.TB, ns, replica string, cond func(*v1.ConfigMap, error) error) {
	t.Helper()
	maps := testenv.ClientAt(t, replica).CoreV1().ConfigMaps(ns)
	n := 0
	testenv.Eventually(t, soon, func() error {
		n++
		return cond(maps.Create(context.Background(), newConfigMap(fmt.Sprintf("%s-%d", replica, n)),
			metav1.CreateOptions{}))
	})
}

// F41: validating webhooks in pods are called concurrently: four webhooks that wait for each other
// all respond. A denial has the webhook's name and message. A validating webhook that returns a
// patch fails, and the patch is ignored.
func TestValidatingWebhooksSideBySide(t *testing.T) {
	t.Parallel()
	s, ns := installWebhookServers(t, 1), testenv.Namespace(t)
	t.Run("together", func(t *testing.T) { together(t, s, ns) })
	installValidating(t, ns, "tamper", webhook{from: s, path: "/tamper", rules: aboutMaps})
	for _, replica := range testenv.Replicas() {
		createEventually(t, ns, replica, func(_ *v1.ConfigMap, err error) error {
			if !apierrors.IsInternalError(err) ||
				!strings.Contains(err.Error(), "validating webhook may not return response.patch") {
				return fmt.Errorf("%s: a validating webhook that sends a patch: %w", replica, err)
			}
			return nil
		})
	}
	installValidating(t, ns, "deny", webhook{name: "no", from: s, path: "/deny", rules: aboutMaps},
		webhook{name: "yes", from: s, path: "/allow", rules: aboutMaps})
	denied := fmt.Sprintf(`admission webhook "no.%s.example.com" denied the request: never`, ns)
	for _, replica := range testenv.Replicas() {
		createEventually(t, ns, replica, func(_ *v1.ConfigMap, err error) error {
			if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), denied) {
				return fmt.Errorf("%s: what one of three denies: %w", replica, err)
			}
			return nil
		})
	}
}

// together configures four webhooks that wait for each other, beside a webhook that returns a
// patch.
func together(t *testing.T, s *webhookServers, ns string) {
	var all []webhook
	for i := range 4 {
		all = append(all, webhook{name: fmt.Sprintf("together%d", i), from: s, path: "/together", rules: aboutMaps})
	}
	installValidating(t, ns, "together", append(all,
		webhook{name: "tamper", from: s, path: "/tamper", rules: aboutMaps, more: "failurePolicy: Ignore"})...)
	n := 0
	testenv.Eventually(t, soon, func() error {
		n++
		m := &v1.ConfigMap{}
		got :=
			testenv.ClientAt(t, testenv.Replicas()[0]).CoreV1().RESTClient().Post().Namespace(ns).Resource(
				"configmaps").
				Body(newConfigMap(fmt.Sprintf("together-%d", n))).Do(context.Background())
		if err := got.Into(m); apierrors.IsForbidden(err) {
			t.Fatal(err)
		} else if err != nil { // it knows of the webhooks, and not yet where their pod is
			return err
		}
		if len(m.Labels) > 0 {
			t.Fatalf("validating webhooks wrote labels %v", m.Labels)
		}
		if said := fmt.Sprint(got.Warnings()); strings.Count(said, "asked with three others") == 0 {
			return fmt.Errorf("the replica has not received the webhooks: %s", said)
		}
		return nil
	})
}

const (
	unlimited = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec:\n" +
		"  containers: [{name: main, image: \"keelson.dev/tools:v1\", command: [sleep, \"1000000\"]}]\n"
	limited = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec:\n  terminationGracePeriodSeconds: 0\n" +
		"  containers: [{name: main, image: \"keelson.dev/tools:v1\", command: [sleep, \"1000000\"], resources: " +
		"{limits: {memory: 32Mi}}}]\n"
	mustLimit = "apiVersion: policy.example.com/v1\nkind: RequiredLimits\nmetadata: {name: NAME}\nspec: {limits: " +
		"[LIMIT], action: ACTION}\n"
)

// F42: a policy engine in pods, with constraints as custom resources, denies pods by name with a
// message that kubectl shows and the audit log records. When the engine is down and its failure
// policy is Fail, only its own requests pass; when it is back, its constraints are in force again.
func TestPolicyEngine(t *testing.T) {
	t.Parallel()
	s, ns := installWebhookServers(t, 1), testenv.Namespace(t)
	s.applyFile("testdata/constraints.yaml")
	t.Cleanup(func() {
		testenv.Kctl(t, "delete", "crd", "requiredlimits.policy.example.com")
		testenv.Kctl(t, "delete", "clusterrole,clusterrolebinding", s.ns+"-constraints")
	})
	testenv.Kctl(t, "wait", "--for=condition=Established", "crd/requiredlimits.policy.example.com", "--timeout=180s")
	labelNamespace(t, s.ns, `{"policy.example.com/ignore":"engine"}`)
	labelNamespace(t, ns, `{"policy.example.com/of":"`+ns+`"}`)
	labelNamespace(t, s.ns, `{"policy.example.com/of":"`+ns+`"}`)
	installValidating(t, ns, "engine", webhook{from: s, path: "/constraints", rules: aboutPods,
		more: "failurePolicy: Fail",
		selector: "{matchLabels: {policy.example.com/of: " + ns + "}, " +
			"matchExpressions: [{key: policy.example.com/ignore, operator: DoesNotExist}]}"})
	constraint := func(name, limit, action string) {
		testenv.Kctl(t, "apply", "-f", writeManifest(t,
			strings.NewReplacer("NAME", name, "LIMIT", limit, "ACTION", action).Replace(mustLimit)))
	}
	constraint("must-have-memory", "memory", "deny")
	constraint("should-have-cpu", "cpu", "warn")
	denied := fmt.Sprintf(`admission webhook "hook.%s.example.com" denied the request: `, ns) +
		"[must-have-memory] all containers must have resource limits: main has no limit of memory"
	for _, replica := range testenv.Replicas() { // each replica may receive the request below
		testenv.Eventually(t, soon, func() error {
			_, err := testenv.ClientAt(t, replica).CoreV1().Pods(ns).Create(context.Background(), onePod("bad"),
				metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if !apierrors.IsForbidden(err) {
				return fmt.Errorf("%s: what the engine denies: %w", replica, err)
			}
			return nil
		})
	}
	for _, program := range kubectlPrograms() {
		testenv.Eventually(t, soon, func() error {
			out, err := testenv.Try(t, program, "-n", ns, "apply", "-f",
				writeManifest(t, strings.ReplaceAll(unlimited, "NAME", "bad")))
			if err == nil || !strings.Contains(out, denied) || !strings.Contains(out, "Forbidden") {
				return fmt.Errorf("%s: %v, want %q in\n%s", filepath.Base(program), err, denied, out)
			}
			return nil
		})
	}
	audit(t, ns)
	out := testenv.Kctl(t, "-n", ns, "apply", "-f", writeManifest(t, strings.ReplaceAll(limited, "NAME", "good")))
	if !strings.Contains(out, "Warning: [should-have-cpu]") {
		t.Errorf("the other constraint does not warn:\n%s", out)
	}
	if out := testenv.Kctl(t, "get", "constraints"); !strings.Contains(out, "must-have-memory   deny") {
		t.Errorf("the constraints are shown as\n%s", out)
	}
	s.runKctl("run", "exempt", "--image=keelson.dev/hello:v1")

	s.runKctl("scale", "deployment/hooks", "--replicas=0")
	s.runKctl("wait", "--for=delete", "pods", "-l", "app=hooks", "--timeout=180s")
	for _, replica := range testenv.Replicas() {
		testenv.Eventually(t, soon, func() error {
			_, err := testenv.ClientAt(t, replica).CoreV1().Pods(ns).Create(context.Background(), onePod("late"),
				metav1.CreateOptions{})
			if !apierrors.IsInternalError(err) ||
				!strings.Contains(err.Error(), fmt.Sprintf(`failed calling webhook "hook.%s.example.com"`, ns)) {
				return fmt.Errorf("%s without the engine: %w", replica, err)
			}
			return nil
		})
	}
	s.runKctl("run", "exempt-too", "--image=keelson.dev/hello:v1")
	s.runKctl("scale", "deployment/hooks", "--replicas=1")
	s.runKctl("rollout", "status", "deployment/hooks", "--timeout=180s")
	testenv.Eventually(t, soon, func() error {
		out, err := tryKctl(t, ns, "apply", "-f", writeManifest(t, strings.ReplaceAll(unlimited, "NAME", "bad")))
		if err == nil || !strings.Contains(out, denied) {
			return fmt.Errorf("with the engine again: %v\n%s", err, out)
		}
		return nil
	})
}

func onePod(name string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{
		Containers: []v1.Container{{Name: "main", Image: "keelson.dev/hello:v1"}}}}
}

// audit checks the audit annotations of the engine.
func audit(t *testing.T, ns string) {
	t.Helper()
	key := fmt.Sprintf("hook.%s.example.com/denied-by", ns)
	testenv.Eventually(t, soon, func() error {
		for _, line := range auditLines(t, ns) {
			var e struct{ Annotations map[string]string }
			if json.Unmarshal(line, &e) == nil && e.Annotations[key] == "must-have-memory" {
				return nil
			}
		}
		return errors.New("no audit record says " + key)
	})
}

// auditLines are the records of all replicas in which a word stands.
func auditLines(t testing.TB, word string) (out [][]byte) {
	t.Helper()
	for _, replica := range testenv.Replicas() {
		path := filepath.Join(filepath.Dir(testenv.Host(t, replica).LogFile()), "lib/controlplane/audit/audit.log")
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // the replica has not been asked for anything that is recorded
		}
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 4<<20)
		for lines.Scan() {
			if strings.Contains(lines.Text(), word) {
				out = append(out, slices.Clone(lines.Bytes()))
			}
		}
		_ = f.Close()
		if err := lines.Err(); err != nil {
			t.Fatalf("reading %s: %v", path, err)
		}
	}
	return out
}
