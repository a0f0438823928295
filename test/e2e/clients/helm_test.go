package clients

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// helmProgram runs one of the Helm programs for a test, with its own folders and without plugins.
type helmProgram struct {
	t    *testing.T
	path string
	ns   string
	home string
}

func (h helmProgram) newCommand(args ...string) *exec.Cmd {
	cmd := exec.Command(h.path, append([]string{"-n", h.ns, "--kubeconfig", testenv.Lab().Config.Kubeconfig},
		args...)...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+h.home, "HELM_CONFIG_HOME="+h.home, "HELM_DATA_HOME="+h.home)
	return cmd
}

func (h helmProgram) runHelm(args ...string) string {
	h.t.Helper()
	out, err := h.newCommand(args...).CombinedOutput()
	if err != nil {
		h.t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// F15: the released Helm 3 and 4 install a chart with a CRD, a custom resource, hooks and a test,
// upgrade it, detect a failed upgrade, roll back and uninstall it. Resources for which Helm has
// waited are ready when it returns.
func TestHelm(t *testing.T) {
	for _, version := range []string{"helm3", "helm4"} {
		t.Run(version, func(t *testing.T) {
			h := helmProgram{t, clientProgram(t, version), testenv.Namespace(t), t.TempDir()}
			chart, err := filepath.Abs("testdata/chart")
			if err != nil {
				t.Fatal(err)
			}
			cs, ctx := testenv.Client(t), context.Background()
			greeting := func() string {
				c, err := cs.CoreV1().ConfigMaps(h.ns).Get(ctx, "shop-motd", metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				return c.Data["greeting"]
			}
			ready := func(want int32) {
				t.Helper()
				d, err := cs.AppsV1().Deployments(h.ns).Get(ctx, "shop-web", metav1.GetOptions{})
				if err != nil || d.Status.ReadyReplicas != want {
					t.Errorf("the deployment has %d ready replicas, want %d: %v", d.Status.ReadyReplicas, want, err)
				}
			}
			h.runHelm("install", "shop", chart, "--set", "greeting=hello", "--wait", "--timeout", "4m")
			ready(1)
			if got := greeting(); got != "hello" {
				t.Errorf("installed with greeting %q", got)
			}
			if out := h.runHelm("test", "shop", "--timeout", "4m"); !strings.Contains(out, "Succeeded") {
				t.Errorf("the output of helm test is\n%s", out)
			}
			h.runHelm("upgrade", "shop", chart, "--set", "greeting=welcome,replicas=2", "--wait", "--timeout", "4m")
			ready(2)
			if got := greeting(); got != "welcome" {
				t.Errorf("upgraded to greeting %q", got)
			}
			out, err := h.newCommand("upgrade", "shop", chart, "--set", "greeting=bad,hook=false", "--timeout",
				"4m").CombinedOutput()
			if err == nil || !strings.Contains(string(out), "pre-upgrade hook") {
				t.Errorf("an upgrade with a failing hook: %v\n%s", err, out)
			}
			if got := greeting(); got != "welcome" {
				t.Errorf("a failed upgrade left greeting %q", got)
			}
			h.runHelm("rollback", "shop", "1", "--wait", "--timeout", "4m")
			if got := greeting(); got != "hello" {
				t.Errorf("rolled back to greeting %q", got)
			}
			h.checkHistory()
			h.runHelm("uninstall", "shop", "--wait", "--timeout", "4m")
			if _, err := cs.AppsV1().Deployments(h.ns).Get(ctx, "shop-web",
				metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("after the uninstallation: %v", err)
			}
		})
	}
}

// checkHistory checks the releases that Helm stores in Secrets of the cluster.
func (h helmProgram) checkHistory() {
	h.t.Helper()
	var revisions []struct {
		Revision int    `json:"revision"`
		Status   string `json:"status"`
	}
	if err := json.Unmarshal([]byte(h.runHelm("history", "shop", "-o", "json")), &revisions); err != nil {
		h.t.Fatal(err)
	}
	want := []string{"superseded", "superseded", "failed", "deployed"}
	for i, r := range revisions {
		if len(revisions) != len(want) || r.Revision != i+1 || r.Status != want[i] {
			h.t.Fatalf("history %+v, want %v", revisions, want)
		}
	}
}
