package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

const (
	installerImage = "example.com/theirs/install:v1"
	theirPlugin    = "theirs-ptp"
	theirFile      = "10-theirs.conflist"
	theirConflist  = `{"cniVersion":"1.0.0","name":"theirs","plugins":[{"type":"` + theirPlugin + `","mtu":1400,` +
		`"ipam":{"type":"host-local","dataDir":"/run/theirs","ranges":[[{"subnet":"198.51.100.0/28"}]],` +
		`"routes":[{"dst":"0.0.0.0/0"}]}}]}`
)

// createInstaller creates a DaemonSet as network products ship it, on the nodes' own network. An
// init container puts a plugin into /opt/cni/bin and a configuration into /etc/cni/net.d. The
// DaemonSet removes its configuration when it ends.
func (w testNamespace) createInstaller(node string) {
	w.Helper()
	plugin := filepath.Join(w.TempDir(), "ptp")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", plugin,
		"github.com/containernetworking/plugins/plugins/main/ptp")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		w.Fatalf("building the plugin: %v\n%s", err, out)
	}
	testenv.LoadImage(w, installerImage, map[string]string{"bin/busybox": "/bin/busybox", "cni/" + theirPlugin: plugin},
		"/bin/busybox", "sh", "-c")
	labels := map[string]string{"app": "theirs"}
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "theirs"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}}}
	d.Spec.Template.Labels = labels
	spec := &d.Spec.Template.Spec
	*spec = newPod("daemon", installerImage).Spec
	spec.NodeSelector = map[string]string{v1.LabelHostname: node}
	spec.HostNetwork = true
	spec.Tolerations = []v1.Toleration{{Operator: v1.TolerationOpExists}}
	spec.TerminationGracePeriodSeconds = new(int64(90)) // within which the hook has to be through
	var mounts []v1.VolumeMount
	for name, path := range map[string]string{"bin": "/opt/cni/bin", "conf": "/etc/cni/net.d"} {
		spec.Volumes = append(spec.Volumes, v1.Volume{Name: name,
			VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: path,
				Type: new(v1.HostPathDirectoryOrCreate)}}})
		mounts = append(mounts, v1.VolumeMount{Name: name, MountPath: "/host/" + name})
	}
	spec.InitContainers = []v1.Container{{Name: "install", Image: installerImage, VolumeMounts: mounts,
		Env: []v1.EnvVar{{Name: "CONFLIST", Value: theirConflist}},
		Args: []string{fmt.Sprintf("b=/bin/busybox; $b cp /cni/%[1]s /host/bin/.%[1]s && $b mv /host/bin/.%[1]s "+
			"/host/bin/%[1]s && "+
			"echo \"$CONFLIST\" > /host/conf/%[2]s.new && $b mv /host/conf/%[2]s.new /host/conf/%[2]s",
			theirPlugin, theirFile)}}}
	c := &spec.Containers[0]
	c.Command, c.Args, c.VolumeMounts = nil, []string{"trap exit TERM; /bin/busybox sleep 1000000 & wait"}, mounts
	c.Lifecycle =
		&v1.Lifecycle{PreStop: &v1.LifecycleHandler{
			Exec: &v1.ExecAction{Command: []string{"/bin/busybox", "rm", "/host/conf/" + theirFile}}}}
	if _, err := w.cs.AppsV1().DaemonSets(w.ns).Create(context.Background(), d, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	host := testenv.Host(w, node)
	w.Cleanup(func() {
		_ = host.Command(context.Background(), "rm", "-f", "/etc/cni/net.d/"+theirFile,
			"/opt/cni/bin/"+theirPlugin).Run()
	})
}

// F109: a network product installs itself by a DaemonSet. New pods are on its network, also after a
// restart of the agent, and existing pods stay reachable. When it is removed, new pods are on
// Keelson's network again, and nothing is left of the pods of its network.
func TestNetworkOfADaemonSet(t *testing.T) {
	w := newNamespace(t)
	const node = "w3"
	start := func(name string) string {
		t.Helper()
		p := newPod(name, hello)
		p.Spec.NodeName = node
		p.Spec.Containers[0].ReadinessProbe = webDeployment("", 1).Spec.Template.Spec.Containers[0].ReadinessProbe
		p.Spec.Containers[0].Ports = webDeployment("", 1).Spec.Template.Spec.Containers[0].Ports
		w.createPod(p)
		return w.awaitPod(name, requireReady).Status.PodIP
	}
	answers := func(name, address string) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			out, err := fetchBody(testenv.HTTP(testenv.Host(t, node)), "http://"+address+":8080/")
			if err == nil && !strings.Contains(out, name) {
				err = fmt.Errorf("it says %q", out)
			}
			if err != nil {
				return fmt.Errorf("pod %s at %s: %w", name, address, err)
			}
			return nil
		})
	}
	theirs := func(address string) bool { return strings.HasPrefix(address, "198.51.100.") }
	before := start("before")
	if theirs(before) {
		t.Fatalf("before there is another network a pod has %s", before)
	}
	w.createInstaller(node)
	testenv.Eventually(t, soon, func() error {
		d, err := w.cs.AppsV1().DaemonSets(w.ns).Get(context.Background(), "theirs", metav1.GetOptions{})
		if err == nil && d.Status.NumberReady != 1 {
			err = fmt.Errorf("DaemonSet theirs: %+v", d.Status)
		}
		return err
	})
	during := start("during")
	if !theirs(during) {
		t.Errorf("with another network a pod has %s", during)
	}
	answers("during", during)
	answers("before", before)
	if testenv.Owned() {
		testenv.Kctl(t, "lab", "restart", "--daemon", node)
		again := start("again")
		if !theirs(again) {
			t.Errorf("of a new agent a pod has %s", again)
		}
		answers("again", again)
		answers("before", before)
	}
	if err := w.cs.AppsV1().DaemonSets(w.ns).Delete(context.Background(), "theirs", metav1.DeleteOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		// Terminating ones too: the hook that takes the configuration away is a part of that.
		left, err := w.cs.CoreV1().Pods(w.ns).List(context.Background(),
			metav1.ListOptions{LabelSelector: "app=theirs"})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("there is still %s", left.Items[0].Name)
		}
		return err
	})
	after := start("after")
	if theirs(after) {
		t.Errorf("after it went a pod has %s", after)
	}
	for name, address := range map[string]string{"before": before, "during": during, "after": after} {
		answers(name, address)
	}
	w.deletePod("during")
	if testenv.Owned() {
		w.deletePod("again")
	}
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Host(t, node).Command(context.Background(), "sh", "-c",
			"ls /run/theirs/theirs | grep 198 || true; ip route | grep 198.51.100 || true").CombinedOutput()
		if err == nil && len(out) > 0 {
			err = fmt.Errorf("of the other network there is left: %s", out)
		}
		return err
	})
}
