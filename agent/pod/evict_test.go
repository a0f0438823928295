package pod

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

const short = "The node was low on resource: memory. "

// expectEvicted fails the test unless the pod's status is that of an evicted pod.
func (n *node) expectEvicted(when string, uid types.UID) {
	n.t.Helper()
	virtual.Wait()
	st := n.reportedPod(uid).Status
	c := lifecycle.FindCondition(st.Conditions, v1.DisruptionTarget)
	if st.Phase != v1.PodFailed || st.Reason != "Evicted" || st.Message != short || c == nil ||
		c.Status != v1.ConditionTrue ||
		c.Reason != v1.PodReasonTerminationByKubelet || c.Message != short {
		n.t.Errorf("%s: %+v", when, st)
	}
	if n.rt.Running(uid, "app") != "" {
		n.t.Errorf("%s its container runs", when)
	}
}

// An evicted pod fails at once with the reason and is not restarted. That also holds for the next
// agent process if the control plane has not got the status. F95
func TestEvict(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		nd := &v1.Node{Status: v1.NodeStatus{Allocatable: v1.ResourceList{v1.ResourcePods: resource.MustParse("1")}}}
		n.cfg.Node = func() *v1.Node { return nd }
		n.startAgent()
		defer func() { n.stop() }()
		hook := v1.Container{Name: "app", Image: "hello:1",
			Lifecycle: &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 20}}}}
		n.cluster.Put(simplePod("u1", hook))
		n.expectStatus("u1", running)
		before := n.reportedPod("u1")
		if got := n.set.EvictablePods(); len(got) != 1 || got[0].UID != "u1" || n.set.HasEnded("u1") {
			t.Fatalf("can be evicted: %v", got)
		}
		begin := time.Now()
		if !n.set.EvictPod("u1", short) || n.set.EvictPod("no such pod", short) {
			t.Error("it says that it evicts what there is not, or not what there is")
		}
		n.expectEvicted("evicted", "u1")
		if took := time.Since(begin); took != 0 || n.rt.Count("StopContainer") != 1 {
			t.Errorf("it took %s: a pod of a node that is short gets no grace; %q", took, n.rt.Journal())
		}
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, "Evicted "+short) {
			t.Errorf("events: %s", e)
		}
		if got := n.set.EvictablePods(); len(got) != 0 || !n.set.HasEnded("u1") || !n.set.HasEnded("never was") {
			t.Errorf("once it has ended it can be evicted: %v", got)
		}
		// The control plane has not got the status, the runtime has lost the pod in a power
		// failure, and the node may have no room for it.
		nd.Status.Allocatable[v1.ResourcePods] = resource.MustParse("0")
		n.stop()
		n.cluster.Put(before)
		n.startAgent()
		n.expectEvicted("after a restart of the agent", "u1")
		n.stop()
		n.cluster.Put(before)
		starts := n.rt.Count("StartContainer")
		n.rt = &fake.Runtime{Network: n.net}
		n.cfg.Deps.Runtime = n.rt
		n.startAgent()
		n.expectEvicted("after a power cut", "u1")
		if starts += n.rt.Count("StartContainer"); starts != 1 {
			t.Errorf("its container was started %d times", starts)
		}
		deletePod(n, "u1", 0)
		virtual.Wait()
		if !n.cluster.Gone("u1") {
			t.Error("it does not go when it is deleted")
		}
		if left, err := os.ReadDir(filepath.Join(n.cfg.Paths.State, "pods")); err != nil || len(left) != 0 {
			t.Errorf("left in the pods' folder: %v, %v", left, err)
		}
	})
}

// The eviction of a pod that is being deleted ends its remaining grace period; SIGTERM is sent
// once. F95
func TestEvictWhatIsGoing(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.IgnoreTerm = map[string]bool{"app": true}
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		deletePod(n, "u1", 600)
		time.Sleep(10 * time.Second)
		virtual.Wait()
		if n.rt.Running("u1", "app") == "" || len(n.set.EvictablePods()) != 1 {
			t.Fatal("it has ended by itself")
		}
		if !n.set.EvictPod("u1", short) || len(n.set.EvictablePods()) != 0 {
			t.Error("it is not told to go, or would be once more")
		}
		w, p := n.set.workers["u1"].worker, n.reportedPod("u1")
		// a status update does not extend the grace period
		w.updateDesired(lifecycle.Desired{Pod: p, Stop: lifecycle.DeletionStop(p)})
		w.mu.Lock()
		if w.desired.Stop.Grace != 0 || !w.desired.Stop.Delete {
			t.Errorf("it has %s again", w.desired.Stop.Grace)
		}
		w.mu.Unlock()
		time.Sleep(2 * time.Second)
		virtual.Wait()
		if !n.cluster.Gone("u1") {
			t.Errorf("it is still there: %q", n.rt.Journal())
		}
	})
}

// Under disk pressure, the remains of ended containers are removed. For ended pods these are all,
// for running pods those not needed to continue. Statuses do not change. F95
func TestSpare(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		job := simplePod("u1")
		job.Spec.RestartPolicy = v1.RestartPolicyNever
		n.cluster.Put(job, simplePod("u2"))
		virtual.Wait()
		writeFile(t, 4096, podfiles.LogDirectory(n.cfg.Paths.Logs, job), podfiles.ContainerLogPath("app", 0))
		if err := n.rt.Exit("u1", "app", 3, ""); err != nil {
			t.Fatal(err)
		}
		if err := n.rt.Exit("u2", "app", 1, ""); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // minor conditions are reported together with the next status
		virtual.Wait()
		ended, runs := statusSummary(&n.reportedPod("u1").Status), statusSummary(&n.reportedPod("u2").Status)
		if _, c := n.rt.Left(); c != 3 {
			t.Fatalf("%d containers are on record", c)
		}
		if left := n.set.SetDiskReclaim(true); left != 1 {
			t.Errorf("of %d containers of ended pods something is left, want 1", left)
		}
		virtual.Wait()
		if left := n.set.SetDiskReclaim(true); left != 0 {
			t.Errorf("of %d containers of ended pods something is left", left)
		}
		if _, c := n.rt.Left(); c != 1 || n.rt.Running("u2", "app") == "" {
			t.Errorf("%d containers are on record", c)
		}
		if _, err := os.Stat(filepath.Join(podfiles.LogDirectory(n.cfg.Paths.Logs, job),
			podfiles.ContainerLogPath("app", 0))); !os.IsNotExist(err) {
			t.Errorf("its log: %v", err)
		}
		for _, when := range []string{"at once", "after a restart of the agent"} {
			n.expectStatus("u1", ended)
			n.expectStatus("u2", runs)
			if got := n.reportedPod("u1").Status.ContainerStatuses[0].State.Terminated; got == nil ||
				got.ExitCode != 3 {
				t.Errorf("%s: the terminated state is %+v", when, got)
			}
			n.startAgent()
		}
		n.set.SetDiskReclaim(false)
		if got := n.rt.Count("StartContainer"); got != 3 {
			t.Errorf("%d starts", got)
		}
		deletePod(n, "u1", 0)
		virtual.Wait()
		if !n.cluster.Gone("u1") {
			t.Error("it does not go when it is deleted")
		}
	})
}

// The record of a container's end is removed only after the API has the status. Until then, only
// the record prevents another run. F95
func TestSpareWaitsForTheAPI(t *testing.T) {
	p := simplePod("u1")
	p.Spec.RestartPolicy, p.Status.Phase = v1.RestartPolicyNever, v1.PodRunning
	o := lifecycle.Observed{Listed: true, ReclaimDisk: true, Volumes: lifecycle.Volumes{Unmounted: true},
		Containers: []lifecycle.Container{{ID: "c", Name: "app", State: lifecycle.Exited}}}
	for phase, want := range map[v1.PodPhase]string{v1.PodRunning: "[]", v1.PodSucceeded: "[remove c (app#0)]"} {
		p.Status.Phase = phase
		if got := fmt.Sprint(lifecycle.Step(lifecycle.Desired{Pod: p}, o, epoch).Actions); got != want {
			t.Errorf("%s: %s, want %s", phase, got, want)
		}
	}
}

// silentReporter is a reporter that loses the statuses of pods.
type silentReporter struct{ agent.Reporter }

func (silentReporter) PodStatus(*v1.Pod) {}

// The remains of an evicted pod are removed without an acknowledgement of the control plane: the
// node's eviction record prevents another run. If the record cannot be written at first, nothing is
// removed until it is. F95
func TestEvictedPodsAreSparedByThemselves(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Deps.Reporter = silentReporter{n.cluster}
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"), simplePod("u2"))
		virtual.Wait()
		// the eviction record cannot be written
		full := filepath.Join(podfiles.PodDirectory(n.cfg.Paths, "u2"), podfiles.EvictionFile+".tmp")
		if err := os.MkdirAll(full, 0o700); err != nil {
			t.Fatal(err)
		}
		n.set.SetDiskReclaim(true)
		n.set.EvictPod("u1", short)
		n.set.EvictPod("u2", short)
		virtual.Wait()
		if !n.set.HasEnded("u1") || n.set.HasEnded("u2") {
			t.Errorf("ended: %v, %v; want the one that is on record", n.set.HasEnded("u1"), n.set.HasEnded("u2"))
		}
		if _, c := n.rt.Left(); c != 1 {
			t.Errorf("%d containers are left", c)
		}
		if err := os.Remove(full); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if _, c := n.rt.Left(); c != 0 || !n.set.HasEnded("u2") {
			t.Errorf("once there is room %d containers are left", c)
		}
		n.startAgent()
		n.set.SetDiskReclaim(true)
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := n.rt.Count("StartContainer"); got != 2 {
			t.Errorf("%d starts: an evicted pod is run again", got)
		}
	})
}

// A pod that has ended by itself is not evicted: nothing is reported, and no eviction record is
// left. F95
func TestEvictWhatHasEnded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Deps.Reporter = silentReporter{n.cluster}
		n.startAgent()
		defer func() { n.stop() }()
		job := simplePod("u1")
		job.Spec.RestartPolicy = v1.RestartPolicyNever
		n.cluster.Put(job)
		virtual.Wait()
		w := n.set.workers["u1"].worker
		if err := podfiles.SaveEviction(n.cfg.Paths, w.desiredPod(), lifecycle.Stop{Reason: "Evicted"}); err != nil {
			// the pod ends while the record is written
			t.Fatal(err)
		}
		if err := n.rt.Exit("u1", "app", 0, ""); err != nil {
			t.Fatal(err)
		}
		virtual.Wait()
		if n.set.EvictPod("u1", short) || w.evictor.stopEvicted(lifecycle.Stop{Reason: "Evicted", Message: short,
			Disrupted: true}, false) {
			t.Error("it is evicted though it has ended")
		}
		if got, err := podfiles.LoadEviction(n.cfg.Paths, job); got != nil || err != nil {
			t.Errorf("on record: %+v, %v", got, err)
		}
		if e := strings.Join(n.cluster.Events("u1"), "\n"); strings.Contains(e, "Evicted") {
			t.Errorf("events: %s", e)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.status.last.Phase != v1.PodSucceeded ||
			lifecycle.FindCondition(w.status.last.Conditions, v1.DisruptionTarget) != nil {
			t.Errorf("%+v", w.status.last)
		}
	})
}

// An ended pod stays Initialized when the remains of its sidecars are removed. F95
func TestSparedPodsStayInitialized(t *testing.T) {
	p := simplePod("u1")
	p.Spec.InitContainers = []v1.Container{{Name: "side", Image: "hello:1",
		RestartPolicy: new(v1.ContainerRestartPolicyAlways)}}
	p.Status.Phase = v1.PodFailed
	for _, was := range []v1.ConditionStatus{v1.ConditionTrue, v1.ConditionFalse} {
		p.Status.Conditions = []v1.PodCondition{{Type: v1.PodInitialized, Status: was}}
		for what, d := range map[string]lifecycle.Desired{"ended": {Pod: p},
			"evicted": {Pod: simplePod("u1"), Stop: &lifecycle.Stop{Reason: "Evicted", Recorded: true}}} {
			d.Pod.Spec = p.Spec
			got := lifecycle.Status(d, lifecycle.Observed{Listed: true, Volumes: lifecycle.Volumes{Unmounted: true}},
				p.Status, lifecycle.Host{}, epoch)
			if c := lifecycle.FindCondition(got.Conditions, v1.PodInitialized); c == nil || c.Status != was {
				t.Errorf("%s: %+v, want %s", what, c, was)
			}
		}
	}
}

// Under pressure, the usage of pods without limits is measured, for all of them within the
// available time. F95
func TestMeasureStorage(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		dir := t.TempDir()
		n.vol.Root = filepath.Join(dir, "volumes")
		n.cfg.WrittenDirs = func(id string) (own, shared []string) { return []string{filepath.Join(dir, id)}, nil }
		n.startAgent()
		defer func() { n.stop() }()
		p := simplePod("u1")
		p.Spec.Volumes = []v1.Volume{{Name: "data",
			VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
		n.cluster.Put(p, simplePod("u2"))
		virtual.Wait()
		writeFile(t, 3<<20, n.vol.Root, "u1", "data", "file")
		writeFile(t, 2<<20, dir, n.rt.Running("u1", "app"), "file")
		writeFile(t, 1<<20, podfiles.LogDirectory(n.cfg.Paths.Logs, p), "app", "0.log")
		writeFile(t, 9<<20, podfiles.PodDirectory(n.cfg.Paths, "u1"), podfiles.SubPathsDir, "app", "0",
			"what is mounted here is not looked at")
		if got := n.set.Storage()["u1"]; !got.At.IsZero() {
			t.Errorf("measured without being asked: %+v", got)
		}
		got := n.set.MeasureStorage(t.Context(), n.set.EvictablePods())
		mib := func(n uint64) uint64 { return (n + 1<<19) >> 20 }
		if c := got["u1"].Containers["app"]; mib(got["u1"].Used) != 6 || mib(c.Layer) != 2 || mib(c.Logs) != 1 ||
			mib(got["u2"].Used) != 0 || len(got) != 2 {
			t.Errorf("measured: %+v", got)
		}
		if all, few := got["u1"].Inodes, got["u2"].Inodes; all < few+4 || few == 0 {
			// one file in each place, and a directory
			t.Errorf("inodes: %d of u1, %d of u2", all, few)
		}
		if told := n.set.Storage()["u1"]; mib(told.Used) != 6 {
			t.Errorf("what was measured is not told: %+v", told)
		}
	})
}

// A file system that does not respond delays no other measurement. F95
func TestMeasuringEnds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		stuck := make(chan struct{})
		n.cfg.WrittenDirs = func(id string) (own, shared []string) {
			if id == n.rt.Running("u1", "app") {
				<-stuck
			}
			return nil, nil
		}
		n.startAgent()
		defer func() { n.stop() }()
		select {
		case <-n.set.WorkersStarted():
			t.Error("it knows its pods before it has looked")
		default:
		}
		n.cluster.Put(simplePod("u1"), simplePod("u2"))
		virtual.Wait()
		select {
		case <-n.set.WorkersStarted():
		default:
			t.Error("it does not know its pods")
		}
		bounded, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		begin := time.Now()
		got := n.set.MeasureStorage(bounded, n.set.EvictablePods())
		if _, other := got["u2"]; !other || len(got) != 1 || time.Since(begin) > 20*time.Second+cutPatience {
			t.Errorf("after %s: %+v", time.Since(begin), got)
		}
		close(stuck)
		virtual.Wait()
	})
}

// A pod evicted by an earlier agent process counts as being evicted until its remains are gone. A
// pod that ended earlier is not waited for. F95
func TestEvicting(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Delay("StopContainer", time.Hour)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"), simplePod("u2"))
		virtual.Wait()
		n.set.EvictPod("u1", short)
		virtual.Wait()
		if got := n.set.EvictingPod(); got != "" {
			t.Errorf("%s was evicted by this agent itself", got)
		}
		n.stop()
		n.rt.Delay("StopContainer", 20*time.Second)
		n.startAgent()
		for _, want := range []types.UID{"u1", ""} {
			virtual.Wait()
			if got := n.set.EvictingPod(); got != want || n.set.HasEnded("u1") != (want == "") {
				t.Errorf("it waits for %q, want %q", got, want)
			}
			time.Sleep(20 * time.Second)
		}
		n.expectEvicted("evicted by two agents", "u1")
		n.startAgent()
		for begun := false; !begun; {
			if got := n.set.EvictingPod(); got != "" {
				t.Errorf("it waits for %s, which has ended", got)
			}
			select {
			case <-n.set.WorkersStarted():
				begun = true
			case <-time.After(time.Millisecond):
			}
		}
		virtual.Wait()
		if got := n.set.EvictingPod(); got != "" {
			t.Errorf("it waits for %s, which has ended", got)
		}
	})
}
