package pod

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/internal/virtual"
)

// debugContainer returns an ephemeral container with the name dbg.
func debugContainer(target string) v1.EphemeralContainer {
	return v1.EphemeralContainer{TargetContainerName: target, EphemeralContainerCommon: v1.EphemeralContainerCommon{
		Name: "dbg", Image: "tools:1", Stdin: true, StdinOnce: true, TTY: true}}
}

// addEphemeral adds an ephemeral container to a pod of the node, as an update of its subresource
// ephemeralcontainers does.
func (n *node) addEphemeral(uid types.UID, container v1.EphemeralContainer) {
	n.t.Helper()
	p := n.reportedPod(uid).DeepCopy()
	p.Generation++
	p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, container)
	n.cluster.Put(p)
}

// reboot replaces the runtime by one without records, as a reboot of the machine does, and starts
// an agent.
func (n *node) reboot() {
	n.t.Helper()
	n.stop()
	n.rt = &fake.Runtime{Network: n.net}
	n.cfg.Deps.Runtime = n.rt
	n.startAgent()
}

// F128: an ephemeral container starts in a running pod with the processes of its target. The other
// container is not touched. It is never started again: not after its end, by another agent, in
// another sandbox, or after a reboot.
func TestEphemeralContainerStartsOnce(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		app := n.rt.Running("u1", "app")
		n.addEphemeral("u1", debugContainer("app"))
		n.expectStatus("u1", running+"; dbg runs")
		n.expectEvents("u1", "Created Created container: dbg", "Started Started container dbg")
		config := n.rt.ContainerConfig(n.rt.Running("u1", "dbg"))
		if o := config.Linux.SecurityContext.NamespaceOptions; o.Pid != cri.NamespaceMode_TARGET || o.TargetId != app {
			t.Errorf("the container shares the processes of %v", o)
		}
		if !config.Tty || !config.Stdin || !config.StdinOnce || config.LogPath != "dbg/0.log" {
			t.Errorf("streams: %+v", config)
		}
		status := n.reportedPod("u1").Status.EphemeralContainerStatuses[0]
		if status.Started != nil || status.Ready || status.Resources != nil || status.ContainerID == "" {
			t.Errorf("status: %+v", status)
		}
		if now := n.rt.Running("u1", "app"); now != app {
			t.Errorf("the other container is now %s, before %s", now, app)
		}
		if err := n.rt.Exit("u1", "dbg", 3, ""); err != nil {
			t.Fatal(err)
		}
		n.expectStatus("u1", running+"; dbg ended: Error 3")
		n.startAgent()
		time.Sleep(time.Hour) // virtual time
		n.expectStatus("u1", running+"; dbg ended: Error 3")
		if err := n.rt.KillSandbox("u1"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := n.rt.Count("StartContainer dbg"); got != 1 || n.rt.Count("StartContainer app") != 2 {
			t.Errorf("started %d times: %q", got, n.rt.Journal())
		}
		n.reboot()
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := statusSummary(&n.reportedPod("u1").Status); !strings.HasSuffix(got, "; dbg ended: Error 3") ||
			n.rt.Count("StartContainer dbg") != 0 || n.rt.Count("StartContainer app") != 1 {
			t.Errorf("after a reboot: %s; %q", got, n.rt.Journal())
		}
		deletePod(n, "u1", 1)
		if err := n.cluster.Await(t.Context(), "gone", func() bool { return n.cluster.Gone("u1") }); err != nil {
			t.Fatal(err)
		}
		if s, c := n.rt.Left(); s != 0 || c != 0 {
			t.Errorf("%d sandboxes and %d containers are left", s, c)
		}
	})
}

// F128: an ephemeral container that ran when the machine went down has ended in an unknown way.
func TestEphemeralContainerLostInAReboot(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		virtual.Wait()
		n.addEphemeral("u1", debugContainer(""))
		n.expectStatus("u1", running+"; dbg runs")
		n.reboot()
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := statusSummary(&n.reportedPod("u1").Status); !strings.HasPrefix(got, "Running ") ||
			!strings.HasSuffix(got, "; dbg ended: ContainerStatusUnknown 137") {
			t.Errorf("after a reboot: %s", got)
		}
		if n.rt.Count("StartContainer dbg") != 0 {
			t.Errorf("started again: %q", n.rt.Journal())
		}
	})
}

// F128: a container whose target never ran waits with the reason, and starts after its target.
func TestEphemeralContainerWaitsForItsTarget(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.img.Fail("PullImage", agent.ErrImagePull)
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "late:1"}))
		virtual.Wait()
		n.addEphemeral("u1", debugContainer("app"))
		virtual.Wait()
		waiting := n.reportedPod("u1").Status.EphemeralContainerStatuses[0].State.Waiting
		if waiting == nil || waiting.Reason != "CreateContainerConfigError" ||
			waiting.Message != "unable to find target container app" {
			t.Errorf("waiting: %+v", waiting)
		}
		time.Sleep(5 * time.Minute)
		n.expectStatus("u1", running+"; dbg runs")
	})
}

// F96, F128: a node refuses an ephemeral container above its Pod Security ceiling, before its image
// is pulled. The pod keeps running, and is not refused after a reboot either.
func TestCeilingOfEphemeralContainers(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Node = func() *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}} }
		ceiling, err := admission.ParseCeiling("baseline:v1.30")
		if err != nil {
			t.Fatal(err)
		}
		n.cfg.Ceiling = ceiling
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		virtual.Wait()
		yes, bold := true, debugContainer("")
		bold.Name, bold.SecurityContext = "bold", &v1.SecurityContext{Privileged: &yes}
		n.addEphemeral("u1", bold)
		n.addEphemeral("u1", debugContainer(""))
		refused := `; bold waits: PodSecurity "violates PodSecurity \"baseline:v1.30\", the highest level that this ` +
			`node allows (--pod-security): privileged (container \"bold\" must not set ` +
			`securityContext.privileged=true)"`
		n.expectStatus("u1", running+refused+"; dbg runs")
		n.reboot()
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := statusSummary(&n.reportedPod("u1").Status); !strings.HasPrefix(got, "Running ") ||
			!strings.Contains(got, refused) {
			t.Errorf("after a reboot: %s", got)
		}
	})
}
