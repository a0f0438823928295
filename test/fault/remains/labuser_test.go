package remains

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

const (
	soon    = 2 * time.Minute
	objects = 60
	pods    = 4
	isDown  = "the lab on this machine is down: start it with 'kctl lab up' or take it away with 'kctl lab down'"
)

// labUser is a user of this machine with a lab.
type labUser struct {
	*testing.T
	kctl       string
	kubeconfig string
	up         []string          // the arguments by which the lab is made
	before     map[string]string // objects that the API has acknowledged
	containers map[string]string // in which the pods ran last
}

func newLabUser(t *testing.T) *labUser {
	bin := os.Getenv("KEELSON_BIN")
	if bin == "" {
		var err error
		if bin, err = filepath.Abs("../../../bin"); err != nil {
			t.Fatal(err)
		}
	}
	p := &labUser{T: t, kctl: filepath.Join(bin, "kctl"), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	p.up = []string{"lab", "up", "--control-planes=1", "--workers=1", "--bin-dir=" + bin,
		"--kubeconfig-out=" + p.kubeconfig}
	t.Cleanup(func() {
		if t.Failed() {
			if l, err := lab.Open(nil); err == nil {
				testenv.DaemonLogs(p.Output(), l)
			}
		}
		p.runKctl("lab", "down")
		if left := lab.ListLeftovers(); len(left) > 0 {
			t.Errorf("'lab down' left behind: %v", left)
		}
	})
	return p
}

// tryKctl runs kctl and returns its output.
func (p *labUser) tryKctl(args ...string) (string, error) {
	p.Helper()
	out, err := exec.Command(p.kctl, args...).CombinedOutput()
	p.Logf("kctl %s\n%s", strings.Join(args, " "), out)
	return string(out), err
}

// runKctl runs kctl, which must succeed.
func (p *labUser) runKctl(args ...string) string {
	p.Helper()
	out, err := p.tryKctl(args...)
	if err != nil {
		p.Fatalf("kctl %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// requireRefused runs kctl, which must fail with one line that contains the words.
func (p *labUser) requireRefused(words string, args ...string) {
	p.Helper()
	out, err := p.tryKctl(args...)
	if err == nil || !strings.Contains(out, words) || strings.Count(strings.TrimSpace(out), "\n") != 0 {
		p.Errorf("kctl %s: %v, want a line with %q", strings.Join(args, " "), err, words)
	}
}

// requireOutput runs kctl, which must succeed with an output that contains the words.
func (p *labUser) requireOutput(words string, args ...string) {
	p.Helper()
	if out := p.runKctl(args...); !strings.Contains(out, words) {
		p.Errorf("kctl %s does not say %q", strings.Join(args, " "), words)
	}
}

// interruptUp starts "kctl lab up" and kills it with SIGKILL as soon as seen returns true.
func (p *labUser) interruptUp(seen func() bool) {
	p.Helper()
	cmd := exec.Command(p.kctl, p.up...)
	if err := cmd.Start(); err != nil {
		p.Fatal(err)
	}
	testenv.Eventually(p.T, soon, func() error {
		if !seen() {
			return errors.New("'lab up' has not come so far")
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		p.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		p.Fatal("'lab up' had come to its end before it was killed")
	}
}

func (p *labUser) newClient() kubernetes.Interface {
	p.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", p.kubeconfig)
	if err != nil {
		p.Fatal(err)
	}
	cfg.QPS = -1
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		p.Fatal(err)
	}
	return cs
}

// createObjects creates objects and pods.
func (p *labUser) createObjects() {
	p.Helper()
	cs, ctx := p.newClient(), p.Context()
	for i := range objects {
		c := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%d", i)},
			Data: map[string]string{"n": fmt.Sprint(i)}}
		if _, err := cs.CoreV1().ConfigMaps("default").Create(ctx, c, metav1.CreateOptions{}); err != nil {
			p.Fatal(err)
		}
	}
	n, labels, at := int32(pods), map[string]string{"app": "web"}, int64(0)
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DeploymentSpec{
		Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: v1.PodSpec{
			TerminationGracePeriodSeconds: &at,
			Containers:                    []v1.Container{{Name: "web", Image: "keelson.dev/hello:v1"}}}},
	}}
	if _, err := cs.AppsV1().Deployments("default").Create(ctx, d, metav1.CreateOptions{}); err != nil {
		p.Fatal(err)
	}
	p.containers = p.awaitNewContainers(nil)
	p.before = p.objectVersions()
}

// objectVersions returns the UIDs and versions of the objects of createObjects, and the UIDs of the
// pods.
func (p *labUser) objectVersions() map[string]string {
	p.Helper()
	cs := p.newClient()
	out := map[string]string{}
	configs, err := cs.CoreV1().ConfigMaps("default").List(p.Context(), metav1.ListOptions{})
	if err != nil {
		p.Fatal(err)
	}
	for _, c := range configs.Items {
		out["configmap "+c.Name] = string(c.UID) + " " + c.ResourceVersion
	}
	list, err := cs.CoreV1().Pods("default").List(p.Context(), metav1.ListOptions{})
	if err != nil {
		p.Fatal(err)
	}
	for _, pod := range list.Items {
		out["pod "+pod.Name] = string(pod.UID)
	}
	if len(configs.Items) < objects || len(list.Items) != pods {
		p.Errorf("%d config maps and %d pods, want %d and %d", len(configs.Items), len(list.Items), objects, pods)
	}
	return out
}

// awaitNewContainers waits until every pod is Ready in another container than before, and returns
// the containers.
func (p *labUser) awaitNewContainers(before map[string]string) map[string]string {
	p.Helper()
	cs := p.newClient()
	var now map[string]string
	testenv.Eventually(p.T, soon, func() error {
		list, err := cs.CoreV1().Pods("default").List(p.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			return err
		}
		now = map[string]string{}
		for _, pod := range list.Items {
			c := pod.Status.ContainerStatuses
			if len(c) != 1 || !c[0].Ready || c[0].ContainerID == before[pod.Name] {
				return fmt.Errorf("pod %s, want it ready in another container than %q: %s %+v", pod.Name,
					before[pod.Name], pod.Status.Phase, c)
			}
			now[pod.Name] = c[0].ContainerID
		}
		if len(now) != pods {
			return fmt.Errorf("%d pods, want %d", len(now), pods)
		}
		return nil
	})
	return now
}

// restartLab starts the lab again and checks all its content.
func (p *labUser) restartLab() {
	p.Helper()
	began := time.Now()
	p.requireOutput("starting it again from the disks", "lab", "up")
	served := time.Since(began)
	p.containers = p.awaitNewContainers(p.containers)
	after := p.objectVersions()
	lost := 0
	for what, was := range p.before {
		if after[what] != was {
			lost++
			p.Errorf("%s was %s and is %q", what, was, after[what])
		}
	}
	p.Logf("up again after %s, %d pods run after %s; of %d objects and pods %d are lost or changed",
		served.Round(10*time.Millisecond), pods, time.Since(began).Round(10*time.Millisecond), len(p.before), lost)
}

// requireTestsRefused runs a package with tests on a lab. It must fail at once with the words.
func (p *labUser) requireTestsRefused(words string) {
	p.Helper()
	began := time.Now()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), role+"="+otherTests)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), words) {
		p.Errorf("tests on this machine: %v, want exit code 1 and %q: %s", err, words, out)
	}
	if took := time.Since(began); took > soon/2 {
		p.Errorf("tests on this machine were refused after %s only", took)
	}
}

// simulateReboot removes everything that a reboot removes: namespaces, mounts, cgroups and /run.
func (p *labUser) simulateReboot() {
	p.Helper()
	killAll(p.T)
	script := `umount -l /run/netns/* /run/keelson-lab/ns/* /run/keelson-lab/ns; rm -rf /run/netns /run/keelson-lab`
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		p.Fatalf("%v: %s", err, out)
	}
	for _, root := range []string{"/sys/fs/cgroup/*/keelson-lab", "/sys/fs/cgroup/keelson-lab"} {
		found, _ := filepath.Glob(root)
		for _, dir := range found {
			testenv.Eventually(p.T, soon, func() error { return removeCgroups(dir) })
		}
	}
	if left := lab.ListLeftovers(); len(left) != 1 {
		p.Fatalf("after a reboot the disks alone are left, not %v", left)
	}
}

// killForwarder kills the forwarder of the API and no other process.
func (p *labUser) killForwarder() {
	p.Helper()
	there, err := lab.Open(nil)
	if err != nil {
		p.Fatal(err)
	}
	testenv.Eventually(p.T, soon, func() error {
		if testenv.KillGroup("forwarder"); there.ForwarderRuns() {
			return errors.New("the supervisor outlives SIGKILL")
		}
		return nil
	})
}

// removeCgroups removes a cgroup and its children.
func removeCgroups(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	for _, dir := range slices.Backward(dirs) {
		err = errors.Join(err, os.Remove(dir))
	}
	return err
}

// removeFields removes fields of lab.json that earlier releases do not write.
func (p *labUser) removeFields(names ...string) {
	p.Helper()
	const file = "/var/lib/keelson-lab/lab.json"
	var fields map[string]any
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &fields)
	}
	for _, name := range names {
		if fields[name] == nil {
			p.Errorf("lab.json has no field %s", name)
		}
		delete(fields, name)
	}
	if err == nil {
		raw, err = json.Marshal(fields)
	}
	if err == nil {
		err = os.WriteFile(file, raw, 0o600)
	}
	if err != nil {
		p.Fatal(err)
	}
}
