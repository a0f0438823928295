package pod

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/virtual"
)

func TestMain(m *testing.M) { privatemounts.Main(m) }

func TestPullPolicyAndCredentials(t *testing.T) {
	for image, want := range map[string]v1.PullPolicy{"x": v1.PullAlways, "x:latest": v1.PullAlways,
		"x:1": v1.PullIfNotPresent, "h:5000/x": v1.PullAlways, "h:5000/x:1": v1.PullIfNotPresent,
		"x@sha256:1": v1.PullIfNotPresent} {
		if got := pullPolicy(&v1.Container{Image: image}); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
	c := fake.NewCluster()
	c.Put(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "login"},
		Data: map[string][]byte{v1.DockerConfigJsonKey: []byte(
			`{"auths":{"https://reg.example":{"auth":"dXNlcjpwYXNz"},"reg.example/team":{"username":"team",` +
				`"password":"p"},"*.wild.example":{"username":"w"},"other":{"username":"o"}}}`)}})
	p := simplePod("u1")
	p.Spec.ImagePullSecrets = []v1.LocalObjectReference{{Name: "absent"}, {Name: "login"}}
	users := func(image string) (out []string) {
		for _, a := range pullCredentials(c, p, image) {
			out = append(out, a.Username)
		}
		return out
	}
	for image, want := range map[string]string{"reg.example/x:1": "user", "reg.example/team/x:1": "team,user",
		"a.wild.example/x": "w", "a.b.wild.example/x": "", "busybox": ""} {
		if got := strings.Join(users(image), ","); got != want {
			t.Errorf("%s: logins %q, want %q", image, got, want)
		}
	}
}

// The complete configuration of a container: mounts, hosts file, termination message, names, and
// the sources of values.
func TestContainerConfig(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		p := simplePod("u1", v1.Container{Name: "app", Image: "hello:1", Command: []string{"run", "$(WHO)"},
			Args: []string{"$$(WHO)"}, Env: []v1.EnvVar{{Name: "WHO", Value: "me"}},
			VolumeMounts: []v1.VolumeMount{{Name: "cm", MountPath: "/etc/cm"},
				{Name: "data", MountPath: "/data", SubPathExpr: "$(WHO)"}},
			Lifecycle:                &v1.Lifecycle{StopSignal: new(v1.SIGUSR1)},
			TerminationMessagePath:   "/dev/termination-log",
			TerminationMessagePolicy: v1.TerminationMessageFallbackToLogsOnError})
		p.Spec.Volumes = []v1.Volume{{Name: "cm",
			VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{}}},
			{Name: "data", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
		p.Spec.Hostname, p.Spec.Subdomain = "first", "sub"
		p.Spec.HostAliases = []v1.HostAlias{{IP: "192.0.2.9", Hostnames: []string{"alias"}}}
		p.Spec.DNSConfig = &v1.PodDNSConfig{Nameservers: []string{"192.0.2.53"},
			Options: []v1.PodDNSConfigOption{{Name: "edns0"}}}
		n.cluster.Put(p)
		n.expectStatus("u1", running)
		c := n.rt.ContainerConfig(n.rt.Running("u1", "app"))
		if !slices.Equal(c.Command, []string{"run", "me"}) || !slices.Equal(c.Args, []string{"$(WHO)"}) ||
			c.LogPath != "app/0.log" || c.StopSignal != cri.Signal_SIGNAL_SIGUSR1 {
			t.Errorf("command %q %q, log %s, stop signal %v", c.Command, c.Args, c.LogPath, c.StopSignal)
		}
		mount := map[string]*cri.Mount{}
		for _, m := range c.Mounts {
			mount[m.ContainerPath] = m
		}
		if m := mount["/etc/cm"]; m == nil || !m.Readonly || m.HostPath != "/fake/volumes/u1/cm" {
			t.Errorf("/etc/cm: %v", m)
		}
		if m := mount["/data"]; m == nil || m.Readonly || !strings.HasSuffix(m.HostPath, "/pods/u1/subpaths/app/1") {
			t.Errorf("/data: %v", m)
		}
		hosts, err := os.ReadFile(mount["/etc/hosts"].HostPath)
		if err != nil || !strings.Contains(string(hosts), "10.88.0.2\tfirst.sub.default.svc.cluster.local\tfirst\n") ||
			!strings.Contains(string(hosts), "192.0.2.9\talias\n") {
			t.Errorf("hosts: %s, %v", hosts, err)
		}
		sb := n.rt.SandboxConfig("u1")
		if sb.Hostname != "first" || sb.DnsConfig.Servers[0] != "192.0.2.53" || sb.DnsConfig.Options[0] != "edns0" ||
			sb.Linux.CgroupParent != "/keelson/kubepods/besteffort/podu1" {
			t.Errorf("sandbox: %v", sb)
		}
		// The termination message comes from the file. A failed instance without one gets its
		// message from the log.
		if err := os.WriteFile(mount["/dev/termination-log"].HostPath, []byte("good-bye"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.rt.Exit("u1", "app", 0, ""); err != nil {
			t.Fatal(err)
		}
		virtual.Wait()
		if m := n.reportedPod("u1").Status.ContainerStatuses[0].LastTerminationState.Terminated; m == nil ||
			m.Message != "good-bye" || m.Reason != "Completed" {
			t.Errorf("last state: %+v", m)
		}
		log := filepath.Join(n.cfg.Paths.Logs, "default_web-u1_u1", "app", "1.log")
		if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(log,
			[]byte("2026-01-01T00:00:00.000000000Z stdout F one\n2026-01-01T00:00:00.000000000Z stderr P "+
				"tw\n2026-01-01T00:00:00.000000000Z stderr F o\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.rt.Exit("u1", "app", 137, "OOMKilled"); err != nil {
			t.Fatal(err)
		}
		virtual.Wait()
		if m := n.reportedPod("u1").Status.ContainerStatuses[0].LastTerminationState.Terminated; m == nil ||
			m.Message != "one\ntwo\n" || m.Reason != "OOMKilled" {
			t.Errorf("last state from the log: %+v", m)
		}
	})
}

var _ agent.Prober = prober{}
