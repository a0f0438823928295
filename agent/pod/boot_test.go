package pod

import (
	"os"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

// After a power failure of a node, its StatefulSet pod db-0 without attached volumes is
// force-deleted, and the StatefulSet creates db-0 on another node. The machine then boots with a
// checkpoint and without a control plane. Like a kubelet without an API server, the agent must
// start no pod. P9
func TestPodsOfACheckpointWaitAfterABoot(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		confirm := n.cluster.Unconfirmed() // from here on, the assignment is only that of the checkpoint
		_ = confirm
		p := simplePod("db-0")
		p.Spec.RestartPolicy = v1.RestartPolicyAlways
		n.cluster.Put(p)
		n.startAgent() // no sandbox and no container: the machine was off
		defer func() { n.stop() }()
		virtual.Wait()
		if s, c := n.rt.Left(); s != 0 || c != 0 {
			t.Errorf("%d sandboxes and %d containers of a pod that may run elsewhere by now, "+
				"before any control plane answered", s, c)
		}
	})
}

// podOwnedBy returns the pod with a controller owner reference.
func podOwnedBy(p *v1.Pod, apiVersion, kind string) *v1.Pod {
	yes := true
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind, Name: "owner", UID: "owner",
		Controller: &yes}}
	return p
}

// P9: after a boot, only pods that can run on no other node (DaemonSet and mirror pods) start from
// the checkpoint. A confirmed pod starts at once; a pod that is no longer assigned never starts.
func TestPodsStartOnceConfirmed(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		confirm := n.cluster.Unconfirmed()
		mirror := simplePod("static")
		mirror.Annotations[v1.MirrorPodAnnotationKey] = "hash"
		done := simplePod("done")
		done.Status.Phase = v1.PodSucceeded
		moved := podOwnedBy(simplePod("moved"), "apps/v1", "StatefulSet")
		n.cluster.Put(podOwnedBy(simplePod("daemon"), "apps/v1", "DaemonSet"),
			podOwnedBy(simplePod("other"), "example.com/v1", "DaemonSet"),
			podOwnedBy(simplePod("stays"), "apps/v1", "StatefulSet"), mirror, done, moved)
		n.startAgent()
		defer func() { n.stop() }()
		time.Sleep(10 * time.Minute) // virtual time
		virtual.Wait()
		started := func(want ...types.UID) {
			t.Helper()
			virtual.Wait()
			if s, _ := n.rt.Left(); s != len(want) {
				t.Errorf("%d sandboxes, want those of %v", s, want)
			}
			for _, uid := range want {
				if got := n.reportedPod(uid).Status.Phase; got != v1.PodRunning {
					t.Errorf("pod %s is %s", uid, got)
				}
			}
		}
		started("daemon", "static")
		n.cluster.Delete(moved)
		confirm()
		started("daemon", "static", "other", "stays")
	})
}

// P9: an agent restarted within the same boot continues with its pods, also without a control
// plane. Running pods are adopted, and crashed containers are restarted. After a boot none is
// started, also if an agent of that boot ran before.
func TestRestartedAgentsGoOnWithTheirPods(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Identity.BootID = "b1"
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		n.stop()
		n.cluster.Put(simplePod("u2")) // assigned just before the control plane was lost, never started
		n.cluster.Unconfirmed()
		n.startAgent()
		virtual.Wait()
		if s, _ := n.rt.Left(); s != 2 {
			t.Fatalf("%d sandboxes after a restart of the agent, want 2", s)
		}
		for range 2 { // the second agent of the boot has no more information than the first
			n.stop()
			n.cfg.Identity.BootID = "b2"
			n.cluster.Put(simplePod("u3"))
			n.startAgent()
			virtual.Wait()
			if s, _ := n.rt.Left(); s != 2 {
				t.Fatalf("%d sandboxes, want those of the two pods that run", s)
			}
		}
	})
}

// P9: an agent of a release without confirmation records is upgraded while no control plane
// answers. Its running pods continue, and their containers are restarted.
func TestPodsThatRunNeedNoConfirmation(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		n.stop()
		if err := os.Remove(podfiles.ConfirmationFile(n.cfg.Paths)); err != nil {
			t.Fatal(err)
		}
		n.cluster.Unconfirmed()
		n.startAgent()
		virtual.Wait()
		if err := n.rt.Exit("u1", "app", 1, "Error"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // virtual time
		virtual.Wait()
		if got := n.reportedPod("u1").Status.ContainerStatuses[0]; got.RestartCount != 1 || got.State.Running == nil {
			t.Errorf("%+v", got)
		}
	})
}

// P9: --start-unconfirmed-pods starts all pods of the checkpoint after a boot.
func TestUnconfirmedPodsMayBeStarted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.StartUnconfirmedPods = true
		n.cluster.Unconfirmed()
		n.cluster.Put(simplePod("u1"))
		n.startAgent()
		defer func() { n.stop() }()
		n.expectStatus("u1", running)
	})
}

// P9: an unreadable confirmation record counts as none.
func TestDamagedConfirmation(t *testing.T) {
	n := newNode(t)
	n.recordConfirmation()
	for _, content := range []string{"", "{", `{"version":1,"boot":"another"}`} {
		if err := os.WriteFile(podfiles.ConfirmationFile(n.cfg.Paths), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if confirmed, _ := podfiles.WasConfirmedInBoot(n.cfg.Paths, n.cfg.Identity.BootID); confirmed {
			t.Errorf("%q counts as a confirmation", content)
		}
	}
}
