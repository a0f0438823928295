package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
	"keelson.dev/keelson/internal/virtual"
)

// F56, F79, F87, F90: a pod is Pending without a node, is bound once there is room, and both say so.
func TestBindsAndExplains(t *testing.T) {
	b := newBed(t, nil)
	b.node("w1", "2")
	b.lead()
	const trace = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	began := time.Now()
	b.pod("small", "1", func(pod *v1.Pod) { pod.Annotations = map[string]string{api.TraceParentAnnotation: trace} })
	b.awaitNode("small", "w1")
	t.Logf("create to bound: %s", time.Since(began))
	b.eventually("event", func() error {
		if got := b.events("small"); !slices.Equal(got,
			[]string{"Scheduled: Successfully assigned default/small to w1"}) {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
	stages := b.timeline.StagesOfTrace(api.TraceID(trace))
	if len(stages) != 1 || stages[0].Name != "scheduled" || stages[0].Actor != "scheduler/cp1" ||
		!strings.HasPrefix(stages[0].Detail, "filtered 0 of 1 nodes, score ") {
		t.Errorf("stages %+v", stages)
	}
	if pod := b.pod("big", "2"); pod.Spec.NodeName != "" || pod.Status.Phase != v1.PodPending {
		t.Errorf("a new pod has node %q and phase %q", pod.Spec.NodeName, pod.Status.Phase)
	}
	b.awaitReason("big", "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: 1 No "+
		"preemption victims found for incoming pod.")
	b.eventually("event", func() error {
		if got := b.events("big"); !slices.Equal(got,
			[]string{"FailedScheduling: 0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are " +
				"available: 1 No preemption victims found for incoming pod."}) {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
	b.pod("not-ours", "1", func(pod *v1.Pod) { pod.Spec.SchedulerName = "other" })
	b.node("w2", "2")
	b.awaitNode("big", "w2")
	if got := b.get("not-ours").Spec.NodeName; got != "" {
		t.Errorf("a pod of another scheduler was bound to %s", got)
	}
}

// Waiting pods are tried again by the events that may help: room made, a taint taken away, a gate removed.
func TestRequeue(t *testing.T) {
	b := newBed(t, nil)
	b.node("w1", "1", func(n *v1.Node) {
		n.Spec.Taints = []v1.Taint{{Key: "node.kubernetes.io/not-ready", Effect: v1.TaintEffectNoSchedule}}
	})
	b.lead()
	b.pod("first", "1")
	b.awaitReason("first", "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: "+
		"}. preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.")
	if _, err := client.Patch[*v1.Node](b.ctx, b.client, "", "w1", "", types.MergePatchType,
		[]byte(`{"spec":{"taints":null}}`)); err != nil {
		t.Fatal(err)
	}
	b.awaitNode("first", "w1")
	b.pod("second", "1")
	b.awaitReason("second", "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: 1 No "+
		"preemption victims found for incoming pod.")
	zero := int64(0)
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "first",
		metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	b.awaitNode("second", "w1")
	b.node("w2", "1")
	b.pod("gated", "1", func(pod *v1.Pod) {
		pod.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "example.com/wait"}}
	})
	b.pod("after", "100m")
	b.awaitNode("after", "w2") // the gated one was not considered before it
	if got := b.get("gated").Spec.NodeName; got != "" {
		t.Fatalf("a gated pod was bound to %s", got)
	}
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "after",
		metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Patch[*v1.Pod](b.ctx, b.client, "default", "gated", "", types.MergePatchType,
		[]byte(`{"spec":{"schedulingGates":null}}`)); err != nil {
		t.Fatal(err)
	}
	b.awaitNode("gated", "w2")
}

// F80, F90: hundreds of pods at once, failing bindings, changes of leadership: every pod is bound once and no node takes too many.
func TestBurst(t *testing.T) {
	b := newBed(t, nil)
	const nodes, pods = 20, 400
	for i := range nodes {
		b.node(fmt.Sprint("n", i), "20")
	}
	var tries int
	b.binds = func(string) error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if tries++; tries%7 == 0 {
			return errors.New("a fault on the way")
		}
		return nil
	}
	depose := b.lead()
	for i := range pods {
		b.pod(fmt.Sprint("p", i), "1")
		if i%150 == 149 {
			depose()
			depose = b.lead()
		}
	}
	b.eventually("all bound", func() error {
		list, err := client.List[*v1.Pod](b.ctx, b.client, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		perNode, without := make(map[string]int), 0
		for _, pod := range list {
			if pod.Spec.NodeName == "" {
				without++
			}
			perNode[pod.Spec.NodeName]++
		}
		for n, k := range perNode {
			if n != "" && k > 20 {
				t.Fatalf("node %s has %d pods of 1 CPU, and 20 CPUs", n, k)
			}
		}
		if without > 0 {
			return fmt.Errorf("%d pods without a node", without)
		}
		return nil
	})
	depose() // bindings that are under way end, and are counted
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, n := range b.bound {
		if n != 1 {
			t.Errorf("pod %s was bound %d times", name, n)
		}
	}
	if len(b.bound) != pods {
		t.Errorf("%d pods were bound, want %d", len(b.bound), pods)
	}
}

// WaitForFirstConsumer: an existing volume is reserved for the first claim, the selected node is
// set on the second claim for its provisioner, and the pod is bound when both claims are bound.
func TestWaitForFirstConsumer(t *testing.T) {
	b := newBed(t, nil)
	mode := storagev1.VolumeBindingWaitForFirstConsumer
	for name, prov := range map[string]string{"local": "kubernetes.io/no-provisioner", "dynamic": "csi.example"} {
		if _, err := client.Create(b.ctx, b.client,
			&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: prov,
				VolumeBindingMode: &mode}); err != nil {
			t.Fatal(err)
		}
	}
	b.node("w1", "1")
	b.node("w2", "1")
	gib := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	once := []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}
	volume := func(name, class, node string) *v1.PersistentVolume {
		v, err := client.Create(b.ctx, b.client,
			&v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{
				Capacity: gib, AccessModes: once, StorageClassName: class,
				PersistentVolumeSource: v1.PersistentVolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/data"}},
				NodeAffinity: &v1.VolumeNodeAffinity{
					Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
						MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname,
							Operator: v1.NodeSelectorOpIn,
							Values:   []string{node}}}}}}},
			}})
		if err != nil {
			t.Fatal(err)
		}
		v.Status.Phase = v1.VolumeAvailable
		if v, err = client.UpdateStatus(b.ctx, b.client, v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	volume("by-hand", "local", "w2")
	for _, class := range []string{"local", "dynamic"} {
		if _, err := client.Create(b.ctx, b.client,
			&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: class},
				Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &class, AccessModes: once,
					Resources: v1.VolumeResourceRequirements{Requests: gib}}}); err != nil {
			t.Fatal(err)
		}
	}
	b.lead()
	b.pod("p", "1", func(pod *v1.Pod) {
		for _, c := range []string{"local", "dynamic"} {
			pod.Spec.Volumes = append(pod.Spec.Volumes,
				v1.Volume{Name: c,
					VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
						ClaimName: c}}})
		}
	})
	claim := func(name string) *v1.PersistentVolumeClaim {
		c, err := client.Get[*v1.PersistentVolumeClaim](b.ctx, b.client, "default", name)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	b.eventually("the choice written", func() error {
		if got := claim("dynamic").Annotations["volume.kubernetes.io/selected-node"]; got != "w2" {
			return fmt.Errorf("selected node %q", got)
		}
		v, err := client.Get[*v1.PersistentVolume](b.ctx, b.client, "", "by-hand")
		if err != nil || v.Spec.ClaimRef == nil || v.Spec.ClaimRef.Name != "local" {
			return fmt.Errorf("volume %+v, %v", v, err)
		}
		return nil
	})
	if got := b.get("p").Spec.NodeName; got != "" {
		t.Fatalf("the pod was bound to %s before its claims", got)
	}
	volume("made", "dynamic", "w2")
	for name, v := range map[string]string{"local": "by-hand", "dynamic": "made"} {
		// the controller's and the provisioner's part
		c := claim(name).DeepCopy()
		c.Spec.VolumeName = v
		c, err := client.Update(b.ctx, b.client, c)
		if err != nil {
			t.Fatal(err)
		}
		c.Status.Phase = v1.ClaimBound
		if _, err := client.UpdateStatus(b.ctx, b.client, c); err != nil {
			t.Fatal(err)
		}
	}
	b.awaitNode("p", "w2")
}

// recorder implements every extension point and notes the order.
type recorder struct {
	mu     sync.Mutex
	calls  []string
	h      *framework.Handle
	refuse bool // in Filter
}

func (r *recorder) call(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.calls) == 0 || r.calls[len(r.calls)-1] != s { // per node once is enough
		r.calls = append(r.calls, s)
	}
}
func (r *recorder) Name() string { return "Recorder" }
func (r *recorder) PreEnqueue(context.Context, *v1.Pod) *framework.Status {
	r.call("PreEnqueue")
	return nil
}
func (r *recorder) Less(a, b *framework.QueuedPod) bool {
	r.call("QueueSort")
	return a.Added.Before(b.Added)
}
func (r *recorder) PreFilter(context.Context, *framework.Cycle) (map[string]struct{}, *framework.Status) {
	r.call("PreFilter")
	return nil, nil
}
func (r *recorder) Filter(context.Context, *framework.Cycle, *framework.NodeInfo) *framework.Status {
	r.call("Filter")
	if r.refuse {
		return framework.Refuse("Recorder", "node(s) were refused by the test")
	}
	return nil
}
func (r *recorder) PostFilter(context.Context, *framework.Cycle, *framework.FitError) (string, *framework.Status) {
	r.call("PostFilter")
	return "", framework.Refuse("Recorder", "preemption: nothing to preempt.")
}
func (r *recorder) PreScore(context.Context, *framework.Cycle, []*framework.NodeInfo) *framework.Status {
	r.call("PreScore")
	return nil
}
func (r *recorder) Score(context.Context, *framework.Cycle, *framework.NodeInfo) (int64, *framework.Status) {
	r.call("Score")
	return 1, nil
}
func (r *recorder) NormalizeScore(context.Context, *framework.Cycle, []int64) *framework.Status {
	r.call("NormalizeScore")
	return nil
}
func (r *recorder) Reserve(context.Context, *framework.Cycle, string) *framework.Status {
	r.call("Reserve")
	return nil
}
func (r *recorder) Unreserve(context.Context, *framework.Cycle, string) { r.call("Unreserve") }
func (r *recorder) Permit(_ context.Context, c *framework.Cycle, _ string) (*framework.Status, time.Duration) {
	r.call("Permit")
	return &framework.Status{Code: framework.Wait}, time.Minute
}
func (r *recorder) PreBind(context.Context, *framework.Cycle, string) *framework.Status {
	r.call("PreBind")
	return nil
}
func (r *recorder) Bind(ctx context.Context, c *framework.Cycle, node string) *framework.Status {
	r.call("Bind")
	if err := r.h.Bind(ctx, c.Pod.Pod, node); err != nil {
		return framework.Fail("Recorder", err)
	}
	return nil
}
func (r *recorder) PostBind(context.Context, *framework.Cycle, string) { r.call("PostBind") }

// F88, F89: a plugin is called at every extension point, in order, and a pod that Permit holds back is bound when it is let go,
// or gives up its place when it is rejected.
func TestExtensionPoints(t *testing.T) {
	r := &recorder{}
	b := newBed(t, func(h *framework.Handle) []framework.WeightedPlugin {
		r.h = h
		return []framework.WeightedPlugin{{Plugin: r}}
	})
	b.node("w1", "1")
	b.node("w2", "1")
	depose := b.lead()
	pod := b.pod("held", "1")
	held := func(uid types.UID) framework.WaitingPod {
		b.eventually("pod held back", func() error {
			if r.h.Waiting(uid) == nil {
				return errors.New("not yet")
			}
			return nil
		})
		return r.h.Waiting(uid)
	}
	if b.get("held").Spec.NodeName != "" {
		t.Error("bound before it was permitted")
	}
	held(pod.UID).Allow("Recorder")
	b.awaitNode("held", "")
	b.eventually("PostBind", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !slices.Contains(r.calls, "PostBind") {
			return errors.New("not called")
		}
		return nil
	})
	want := []string{"PreEnqueue", "PreFilter", "Filter", "PreScore", "Score", "NormalizeScore", "Reserve", "Permit",
		"PreBind", "Bind", "PostBind"}
	r.mu.Lock()
	if !slices.Equal(r.calls, want) {
		t.Errorf("called %v\nwant   %v", r.calls, want)
	}
	r.calls = nil
	r.mu.Unlock()
	q := b.pod("rejected", "1")
	held(q.UID).Reject("Recorder", "the gang is not complete")
	b.awaitReason("rejected", "0/2 nodes are available: 1 the gang is not complete.")
	r.mu.Lock()
	if !slices.Contains(r.calls, "Unreserve") || slices.Contains(r.calls, "PreBind") {
		t.Errorf("after a rejection: %v", r.calls)
	}
	r.mu.Unlock()
	depose() // nobody schedules while the queue fills and the plugin changes its mind
	r.refuse = true
	b.pod("refused-1", "1")
	b.pod("refused-2", "1")
	b.lead()
	b.awaitReason("refused-1",
		"0/2 nodes are available: 2 node(s) were refused by the test. preemption: nothing to preempt.")
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, point := range []string{"QueueSort", "PostFilter"} {
		if !slices.Contains(r.calls, point) {
			t.Errorf("%s was not called: %v", point, r.calls)
		}
	}
}

// The bind phase alone: pods created beforehand, 1,000 nodes.
func BenchmarkBindPhase(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		bed := newBed(b, plugins.Default)
		for i := range 1000 {
			bed.node(fmt.Sprintf("n%04d", i), "32")
		}
		const pods = 5000
		for i := range pods {
			bed.pod(fmt.Sprint("p", i), "10m")
		}
		if err := bed.informers.WaitForSync(bed.ctx); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		began := time.Now()
		depose := bed.lead()
		bed.eventually("all bound", func() error {
			bed.mu.Lock()
			defer bed.mu.Unlock()
			if len(bed.bound) < pods {
				return fmt.Errorf("%d of %d", len(bed.bound), pods)
			}
			return nil
		})
		b.ReportMetric(pods/time.Since(began).Seconds(), "pods/s")
		b.StopTimer()
		depose()
		b.StartTimer()
	}
}

// The events of pods that get nodes one after the other are written at once: here, twenty in the time that one takes.
func TestEventsOfBindingsAreBatched(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		b.node("n1", "64")
		var mu sync.Mutex
		begun := map[time.Time]int{}
		b.calls = func(r *api.Request) {
			if r.Kind.Resource == "events" && r.Verb == api.VerbCreate {
				mu.Lock()
				begun[time.Now()]++
				mu.Unlock()
				time.Sleep(5 * time.Millisecond) // a commit takes its time
			}
		}
		b.lead()
		for i := range 20 {
			b.pod(fmt.Sprintf("p%d", i), "1")
		}
		time.Sleep(time.Second)
		for i := range 20 {
			b.awaitNode(fmt.Sprintf("p%d", i), "n1")
			want := []string{fmt.Sprintf("Scheduled: Successfully assigned default/p%d to n1", i)}
			if got := b.events(fmt.Sprintf("p%d", i)); !slices.Equal(got, want) {
				t.Errorf("events %q, want %q", got, want)
			}
		}
		if len(begun) != 1 {
			t.Errorf("the events were begun at %d times: %v", len(begun), begun)
		}
	})
}
