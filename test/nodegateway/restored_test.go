package nodegateway_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// A Node of a restored backup loses its mark when its agent has reported the volumes in use, in the
// same revision or a later one, and not by other reports. F110
func TestNodesAreHeardAfterARestore(t *testing.T) {
	b := newTestEnv(t, "cp1")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	if _, err := client.Patch[*v1.Node](b.ctx, b.client, "", "w1", "", types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"",%q:"[]"}}}`, api.AnnotationUnconfirmed,
			api.AnnotationVolumesHeld)); err != nil {
		t.Fatal(err)
	}
	node := func() *v1.Node {
		t.Helper()
		got, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1")
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	facts := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1",
		Labels: map[string]string{"kubernetes.io/arch": "told"}}}
	n.Facts(facts)
	b.awaitCondition("what it says of its machine", func() error {
		if node().Labels["kubernetes.io/arch"] != "told" {
			return errors.New("it has not come")
		}
		return nil
	})
	if !api.IsUnconfirmed(node()) {
		t.Error("unmarked, although it has not reported volumes")
	}
	facts = facts.DeepCopy()
	const holds = `["kubernetes.io/csi/disk.example^h"]`
	const claims = `[{"pod":"p","claim":"c","volume":"v"}]`
	facts.Annotations = map[string]string{"keelson.dev/volumes-in-use": "told", api.AnnotationVolumesHeld: holds,
		api.AnnotationClaimsHeld: claims}
	facts.Status.VolumesInUse = []v1.UniqueVolumeName{api.AttachedVolumeName("disk.example", "h")}
	n.Facts(facts)
	b.awaitCondition("being heard", func() error {
		got := node()
		if !api.IsUnconfirmed(got) &&
			(len(got.Status.VolumesInUse) != 1 || got.Annotations[api.AnnotationVolumesHeld] != holds ||
				got.Annotations[api.AnnotationClaimsHeld] != claims) {
			t.Fatalf("unmarked before its volumes are known: %v, %v", got.Status.VolumesInUse, got.Annotations)
		}
		if api.IsUnconfirmed(got) {
			return errors.New("it has the mark")
		}
		return nil
	})
	facts = facts.DeepCopy()
	delete(facts.Annotations, api.AnnotationVolumesHeld)
	n.Facts(facts)
	b.awaitCondition("an agent of a release that does not report its volumes", func() error {
		if held, stands := node().Annotations[api.AnnotationVolumesHeld]; stands {
			return fmt.Errorf("it holds %s", held)
		}
		return nil
	})
}

// A node that boots while no replica responds has the results of finished containers: its own
// stored reports. No replica sends them back. Reports of others come from the control plane.
func TestNodesKnowWhatTheySaid(t *testing.T) {
	b := newTestEnv(t, "cp1")
	n := b.startAgent("w1", nil)
	never := b.createPod("never", "w1", func(p *v1.Pod) { p.Spec.RestartPolicy = v1.RestartPolicyNever })
	always := b.createPod("always", "w1", nil)
	for _, p := range []*v1.Pod{always, never} {
		said := n.awaitPod(b, p.UID).DeepCopy()
		said.Status.Phase = v1.PodRunning
		said.Status.ContainerStatuses = []v1.ContainerStatus{{Name: p.Spec.Containers[0].Name,
			ContainerID: "keelson://" + p.Name, State: v1.ContainerState{Running: &v1.ContainerStateRunning{}}}}
		n.PodStatus(said)
	}
	b.awaitCondition("what it said is written down", func() error {
		data, err := os.ReadFile(filepath.Join(n.state, "statuses.checkpoint"))
		if err != nil {
			return err
		}
		if !strings.Contains(string(data), "keelson://never") {
			return errors.New("without the pod")
		}
		if data, err = os.ReadFile(filepath.Join(n.state, "assignment.checkpoint")); err == nil &&
			!strings.Contains(string(data), string(never.UID)) {
			err = errors.New("the pod itself is not written down")
		}
		return err
	})
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	b.stopReplica("cp1")
	if data, err := os.ReadFile(filepath.Join(n.state, "statuses.checkpoint")); err != nil ||
		strings.Contains(string(data), "keelson://always") {
		t.Errorf("of the pod that restarts: error %v", err)
	}
	knows := func() {
		t.Helper()
		b.restartAgent(n, nil, []string{"127.0.0.1:1"})
		select {
		case <-n.Synced():
		case <-time.After(patience):
			t.Fatal("no checkpoint was loaded")
		}
		p, ok := n.Pod(never.UID)
		if !ok || p.Status.Phase != v1.PodRunning || len(p.Status.ContainerStatuses) != 1 ||
			p.Status.ContainerStatuses[0].ContainerID != "keelson://never" {
			t.Errorf("it knows %+v", p)
		}
	}
	knows()
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	knows() // it has reported nothing since
}
