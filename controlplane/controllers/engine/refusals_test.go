package engine

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// owner creates pods as a ReplicaSet does: as many as are missing and CountRefusals allows.
type owner struct {
	now     time.Time
	pods    []*corev1.Pod
	created int
}

func (o *owner) reconcile(replicas int, status func(i int) corev1.PodStatus) {
	missing := replicas
	for _, p := range o.pods {
		if !api.IsPodTerminal(p) {
			missing--
		}
	}
	for range CountRefusals(o.pods, o.now).AllowedCreations(missing) {
		o.created++
		p := &corev1.Pod{Status: status(o.created)}
		p.Name, p.Spec.NodeName = fmt.Sprint("p", o.created), "w1"
		p.UID = types.UID(p.Name)
		p.CreationTimestamp = metav1.NewTime(o.now.Truncate(time.Second)) // as the API stores it
		o.pods = append(o.pods, p)
	}
}

func (o *owner) run(d time.Duration, replicas int, status func(i int) corev1.PodStatus) (created int) {
	before := o.created
	for end := o.now.Add(d); o.now.Before(end); o.now = o.now.Add(100 * time.Millisecond) {
		o.reconcile(replicas, status)
	}
	return o.created - before
}

func refusing(int) corev1.PodStatus {
	return corev1.PodStatus{Phase: corev1.PodFailed, Reason: "NodeAffinity", Message: "Pod was rejected: no"}
}

func running(int) corev1.PodStatus { return corev1.PodStatus{Phase: corev1.PodRunning} }
func pending(int) corev1.PodStatus { return corev1.PodStatus{Phase: corev1.PodPending} }

func TestRefusedPodsAreNotReplacedAtOnce(t *testing.T) {
	const replicas = 3
	o := &owner{now: time.Unix(1_000_000, 5e8)}
	if n := o.run(6*time.Second, replicas, refusing); n > 2*replicas+1 {
		t.Errorf("%d pods in 6 s", n)
	}
	if n := o.run(time.Hour, replicas, refusing); n < 10 || n > 30 {
		t.Errorf("%d pods in an hour", n)
	}
	// The node takes pods again: one is tried, and when it has started all others follow at once.
	if o.run(6*time.Minute, replicas, running); len(o.pods) != o.created {
		t.Fatal("a pod was lost")
	}
	up := 0
	for _, p := range o.pods {
		if hasPodStarted(p) {
			up++
		}
	}
	if up != replicas {
		t.Errorf("%d of %d pods run 6 minutes after the node takes pods again", up, replicas)
	}
	if r := CountRefusals(o.pods, o.now); r.Rounds != 0 {
		t.Errorf("%d rounds are still counted", r.Rounds)
	}
}

func TestATriedPodIsWaitedFor(t *testing.T) {
	o := &owner{now: time.Unix(1_000_000, 0)}
	o.run(10*time.Second, 100, refusing)
	if n := o.run(time.Minute, 100, pending); n < 1 || n > 9 {
		t.Errorf("%d pods while the first of them has neither started nor been refused", n)
	}
}

func TestWhatIsNoRefusal(t *testing.T) {
	ran := corev1.PodStatus{Phase: corev1.PodFailed, Reason: "DeadlineExceeded",
		ContainerStatuses: []corev1.ContainerStatus{
			{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}}
	evicted := ran
	evicted.Reason = "Evicted"
	for why, s := range map[string]corev1.PodStatus{
		"evicted":       evicted,
		"it ran":        ran,
		"failed so":     {Phase: corev1.PodFailed},
		"still pending": pending(0),
	} {
		o := &owner{now: time.Unix(1_000_000, 0)}
		o.reconcile(5, func(int) corev1.PodStatus { return s })
		if r := CountRefusals(o.pods, o.now); r.Rounds != 0 || r.Wait != 0 {
			t.Errorf("%s: %+v", why, r)
		}
	}
	// A node under pressure reports the reason Evicted for pods that it does not admit. F95
	pressed := &owner{now: time.Unix(1_000_000, 0)}
	pressed.reconcile(5, func(int) corev1.PodStatus {
		return corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted"}
	})
	if r := CountRefusals(pressed.pods, pressed.now); r.Rounds != 1 || r.Wait == 0 {
		t.Errorf("not admitted: %+v", r)
	}
	// Refusals of long ago, and pods that many nodes refused at the same time, are no reason to wait long.
	o := &owner{now: time.Unix(1_000_000, 0)}
	o.run(time.Second, 100, refusing)
	if r := CountRefusals(o.pods, o.now); r.Rounds != 1 || r.Wait > minRefusalDelay {
		t.Errorf("refused at once: %d rounds, %v", r.Rounds, r.Wait)
	}
	o.run(time.Hour, 1, refusing)
	o.now = o.now.Add(time.Hour)
	o.reconcile(1, refusing)
	if r := CountRefusals(o.pods, o.now); r.Rounds != 1 {
		t.Errorf("after an hour in peace: %d rounds", r.Rounds)
	}
}
