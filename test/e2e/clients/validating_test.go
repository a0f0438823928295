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

func configMap(name string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// createEventually creates a config map as soon as a replica knows what was configured a moment ago, of which cond judges.
func createEventually(t testing.TB, ns, replica string, cond func(*v1.ConfigMap, error) error) {
	t.Helper()
	maps := testenv.ClientAt(t, replica).CoreV1().ConfigMaps(ns)
	n := 0
	testenv.Eventually(t, soon, func() error {
		n++
		return cond(maps.Create(context.Background(), configMap(fmt.Sprintf("%s-%d", replica, n)), metav1.CreateOptions{}))
	})
}

// F41: validating webhooks in pods are asked at the same time: four that each wait for the others are answered. What one of
// them denies is denied, with its name and words; one that would change something has failed, and what it says is ignored.
func TestValidatingWebhooksSideBySide(t *testing.T) {
	t.Parallel()
	s, ns := install(t, 1), testenv.Namespace(t)
	t.Run("together", func(t *testing.T) { together(t, s, ns) })
	validating(t, ns, "tamper", hook{from: s, path: "/tamper", rules: aboutMaps})
	for _, replica := range testenv.Replicas() {
		createEventually(t, ns, replica, func(_ *v1.ConfigMap, err error) error {
			if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "validating webhook may not return response.patch") {
				return fmt.Errorf("%s: a validating webhook that sends a patch: %w", replica, err)
			}
			return nil
		})
	}
	validating(t, ns, "deny", hook{name: "no", from: s, path: "/deny", rules: aboutMaps},
		hook{name: "yes", from: s, path: "/allow", rules: aboutMaps})
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

// together has four webhooks wait for each other, beside one that would change something.
func together(t *testing.T, s *servers, ns string) {
	var all []hook
	for i := range 4 {
		all = append(all, hook{name: fmt.Sprintf("together%d", i), from: s, path: "/together", rules: aboutMaps})
	}
	validating(t, ns, "together", append(all, hook{name: "tamper", from: s, path: "/tamper", rules: aboutMaps, more: "failurePolicy: Ignore"})...)
	n := 0
	testenv.Eventually(t, soon, func() error {
		n++
		m := &v1.ConfigMap{}
		got := testenv.ClientAt(t, testenv.Replicas()[0]).CoreV1().RESTClient().Post().Namespace(ns).Resource("configmaps").
			Body(configMap(fmt.Sprintf("together-%d", n))).Do(context.Background())
		if err := got.Into(m); apierrors.IsForbidden(err) {
			t.Fatal(err)
		} else if err != nil { // it knows of the webhooks, and not yet where their pod is
			return err
		}
		if len(m.Labels) > 0 {
			t.Fatalf("validating webhooks wrote labels %v", m.Labels)
		}
		if said := fmt.Sprint(got.Warnings()); strings.Count(said, "asked with three others") == 0 {
			return fmt.Errorf("the replica has not heard of the webhooks: %s", said)
		}
		return nil
	})
}

const (
	unlimited = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec:\n" +
		"  containers: [{name: main, image: \"keelson.dev/tools:v1\", command: [sleep, \"1000000\"]}]\n"
	limited = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec:\n  terminationGracePeriodSeconds: 0\n" +
		"  containers: [{name: main, image: \"keelson.dev/tools:v1\", command: [sleep, \"1000000\"], resources: {limits: {memory: 32Mi}}}]\n"
	mustLimit = "apiVersion: policy.example.com/v1\nkind: RequiredLimits\nmetadata: {name: NAME}\nspec: {limits: [LIMIT], action: ACTION}\n"
)

// F42: a policy engine in pods, with constraints as objects of its own kind, denies pods by name and with a message that
// kubectl shows and the audit log keeps. When it is gone and fails closed nothing passes but what is its own; when it is
// back its constraints are in force again.
func TestPolicyEngine(t *testing.T) {
	t.Parallel()
	s, ns := install(t, 1), testenv.Namespace(t)
	s.apply("testdata/constraints.yaml")
	t.Cleanup(func() {
		testenv.Kctl(t, "delete", "crd", "requiredlimits.policy.example.com")
		testenv.Kctl(t, "delete", "clusterrole,clusterrolebinding", s.ns+"-constraints")
	})
	testenv.Kctl(t, "wait", "--for=condition=Established", "crd/requiredlimits.policy.example.com", "--timeout=180s")
	label(t, s.ns, `{"policy.example.com/ignore":"engine"}`)
	label(t, ns, `{"policy.example.com/of":"`+ns+`"}`)
	label(t, s.ns, `{"policy.example.com/of":"`+ns+`"}`)
	validating(t, ns, "engine", hook{from: s, path: "/constraints", rules: aboutPods, more: "failurePolicy: Fail",
		selector: "{matchLabels: {policy.example.com/of: " + ns + "}, " +
			"matchExpressions: [{key: policy.example.com/ignore, operator: DoesNotExist}]}"})
	constraint := func(name, limit, action string) {
		testenv.Kctl(t, "apply", "-f", written(t, strings.NewReplacer("NAME", name, "LIMIT", limit, "ACTION", action).Replace(mustLimit)))
	}
	constraint("must-have-memory", "memory", "deny")
	constraint("should-have-cpu", "cpu", "warn")
	denied := fmt.Sprintf(`admission webhook "hook.%s.example.com" denied the request: `, ns) +
		"[must-have-memory] all containers must have resource limits: main has none of memory"
	for _, replica := range testenv.Replicas() { // any of them may be the one that is asked below
		testenv.Eventually(t, soon, func() error {
			_, err := testenv.ClientAt(t, replica).CoreV1().Pods(ns).Create(context.Background(), onePod("bad"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if !apierrors.IsForbidden(err) {
				return fmt.Errorf("%s: what the engine denies: %w", replica, err)
			}
			return nil
		})
	}
	for _, program := range commandLines() {
		testenv.Eventually(t, soon, func() error {
			out, err := testenv.Try(t, program, "-n", ns, "apply", "-f", written(t, strings.ReplaceAll(unlimited, "NAME", "bad")))
			if err == nil || !strings.Contains(out, denied) || !strings.Contains(out, "Forbidden") {
				return fmt.Errorf("%s: %v, want %q in\n%s", filepath.Base(program), err, denied, out)
			}
			return nil
		})
	}
	audit(t, ns)
	out := testenv.Kctl(t, "-n", ns, "apply", "-f", written(t, strings.ReplaceAll(limited, "NAME", "good")))
	if !strings.Contains(out, "Warning: [should-have-cpu]") {
		t.Errorf("the other constraint does not warn:\n%s", out)
	}
	if out := testenv.Kctl(t, "get", "constraints"); !strings.Contains(out, "must-have-memory   deny") {
		t.Errorf("the constraints are shown as\n%s", out)
	}
	s.kctl("run", "exempt", "--image=keelson.dev/hello:v1")

	s.kctl("scale", "deployment/hooks", "--replicas=0")
	s.kctl("wait", "--for=delete", "pods", "-l", "app=hooks", "--timeout=180s")
	for _, replica := range testenv.Replicas() {
		testenv.Eventually(t, soon, func() error {
			_, err := testenv.ClientAt(t, replica).CoreV1().Pods(ns).Create(context.Background(), onePod("late"), metav1.CreateOptions{})
			if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), fmt.Sprintf(`failed calling webhook "hook.%s.example.com"`, ns)) {
				return fmt.Errorf("%s without the engine: %w", replica, err)
			}
			return nil
		})
	}
	s.kctl("run", "exempt-too", "--image=keelson.dev/hello:v1")
	s.kctl("scale", "deployment/hooks", "--replicas=1")
	s.kctl("rollout", "status", "deployment/hooks", "--timeout=180s")
	testenv.Eventually(t, soon, func() error {
		out, err := try(t, ns, "apply", "-f", written(t, strings.ReplaceAll(unlimited, "NAME", "bad")))
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

// audit looks for what the engine says for the record.
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
