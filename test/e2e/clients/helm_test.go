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

// helm runs one of the Helm programs for a test, with folders of its own and no plugins.
type helm struct {
	t    *testing.T
	path string
	ns   string
	home string
}

func (h helm) command(args ...string) *exec.Cmd {
	cmd := exec.Command(h.path, append([]string{"-n", h.ns, "--kubeconfig", testenv.Lab().Config.Kubeconfig}, args...)...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+h.home, "HELM_CONFIG_HOME="+h.home, "HELM_DATA_HOME="+h.home)
	return cmd
}

func (h helm) run(args ...string) string {
	h.t.Helper()
	out, err := h.command(args...).CombinedOutput()
	if err != nil {
		h.t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// F15: Helm 3 and 4 as they are released install a chart with a CRD, an object of it, hooks and a test, upgrade it, find
// a failed upgrade, roll back and uninstall it; what each has waited for is there when it says so.
func TestHelm(t *testing.T) {
	for _, version := range []string{"helm3", "helm4"} {
		t.Run(version, func(t *testing.T) {
			h := helm{t, program(t, version), testenv.Namespace(t), t.TempDir()}
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
			h.run("install", "shop", chart, "--set", "greeting=hello", "--wait", "--timeout", "4m")
			ready(1)
			if got := greeting(); got != "hello" {
				t.Errorf("installed with greeting %q", got)
			}
			if out := h.run("test", "shop", "--timeout", "4m"); !strings.Contains(out, "Succeeded") {
				t.Errorf("helm test says\n%s", out)
			}
			h.run("upgrade", "shop", chart, "--set", "greeting=welcome,replicas=2", "--wait", "--timeout", "4m")
			ready(2)
			if got := greeting(); got != "welcome" {
				t.Errorf("upgraded to greeting %q", got)
			}
			out, err := h.command("upgrade", "shop", chart, "--set", "greeting=bad,hook=false", "--timeout", "4m").CombinedOutput()
			if err == nil || !strings.Contains(string(out), "pre-upgrade hook") {
				t.Errorf("an upgrade whose hook fails: %v\n%s", err, out)
			}
			if got := greeting(); got != "welcome" {
				t.Errorf("a failed upgrade left greeting %q", got)
			}
			h.run("rollback", "shop", "1", "--wait", "--timeout", "4m")
			if got := greeting(); got != "hello" {
				t.Errorf("rolled back to greeting %q", got)
			}
			h.history()
			h.run("uninstall", "shop", "--wait", "--timeout", "4m")
			if _, err := cs.AppsV1().Deployments(h.ns).Get(ctx, "shop-web", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("after the uninstallation: %v", err)
			}
		})
	}
}

// history checks what Helm keeps of its releases in Secrets of the cluster.
func (h helm) history() {
	h.t.Helper()
	var revisions []struct {
		Revision int    `json:"revision"`
		Status   string `json:"status"`
	}
	if err := json.Unmarshal([]byte(h.run("history", "shop", "-o", "json")), &revisions); err != nil {
		h.t.Fatal(err)
	}
	want := []string{"superseded", "superseded", "failed", "deployed"}
	for i, r := range revisions {
		if len(revisions) != len(want) || r.Revision != i+1 || r.Status != want[i] {
			h.t.Fatalf("history %+v, want %v", revisions, want)
		}
	}
}
