package volumeattach

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// soleHistory describes how a single-pod volume that is not attached was restored, and the events
// after that. Pod "u" is in the store.
type soleHistory struct {
	on          int    // the node of pod u in the store; -1 = it has none
	has         int    // the node that has the volume mounted; -1 = none
	by          string // for which pod
	former      bool   // through a deleted claim, whose name another claim has now
	otherVolume bool   // through a PersistentVolume of another name
	becomes     [3]string
	over        bool // the time of nodes that are not known is over before they do
	ends        int  // after this number of node fates the pod has ended, if its node is connected
}

func (h soleHistory) String() string {
	return fmt.Sprintf("pod u on %d, mounted on %d by %s (a former claim %v, another volume %v), nodes become %v (the "+
		"time of others is over %v), it ends after %d", h.on, h.has, h.by, h.former, h.otherVolume, h.becomes,
		h.over, h.ends)
}

// reportHeld returns the claims that a node reports: those of another pod, and those of h.by if the
// node has it.
func (h soleHistory) reportHeld(t *testing.T, has bool) string {
	t.Helper()
	list := []api.HeldClaim{{Pod: "another", Claim: "other", Volume: "another"}}
	if has {
		held := api.HeldClaim{Pod: types.UID(h.by), Claim: "c", Volume: "v"}
		if h.former {
			held.Claim = "former"
		}
		if h.otherVolume {
			held.Volume = ""
		}
		list = append(list, held)
	}
	reported, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	return string(reported)
}

// play runs a whole history: at the end the pod of the store has the volume, if its node runs, and
// never at the same time as another pod.
func (h soleHistory) play(t *testing.T) bool {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v",
		Annotations: map[string]string{api.AnnotationUnconfirmed: ""}}}
	v.Spec.AccessModes, v.Spec.ClaimRef = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
		&corev1.ObjectReference{UID: "c"}
	s, good := singlePodVolume{Volume: v, UnrecordedNodeWait: time.Minute}, true
	wrong := func(format string, args ...any) {
		good = false
		t.Errorf("%s: %s", fmt.Sprintf(format, args...), h)
	}
	for i := range h.becomes {
		s.Nodes = append(s.Nodes,
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i),
				Annotations: map[string]string{api.AnnotationUnconfirmed: ""}}})
	}
	if h.on >= 0 {
		s.Users = []User{{user("u", nodeName(h.on), false), v}}
	}
	mounted := map[string]int{} // by pod: its node
	if h.has >= 0 {
		mounted[h.by] = h.has
	}
	settle := func() {
		for _, n := range s.Nodes {
			if api.IsUnconfirmed(n) {
				continue
			}
			node, is := mounted[h.by]
			n.Annotations[api.AnnotationClaimsHeld] = h.reportHeld(t, is && nodeName(node) == n.Name)
		}
		why := s.waitingReason()
		if why == "" {
			delete(v.Annotations, api.AnnotationUnconfirmed)
		} else if s.UnrecordedNodeWait == 0 && !strings.Contains(why, "node w") {
			wrong("the reason does not name the node: %q", why)
		}
		at, has := mounted["u"]
		alive := h.on >= 0 && slices.ContainsFunc(s.Nodes, func(n *corev1.Node) bool {
			return n.Name == nodeName(h.on) && !api.IsUnconfirmed(n)
		})
		if alive && !api.IsUnconfirmed(v) && (!has || at != h.on) {
			if has {
				wrong("given to the pod on %d, and it runs on %d", h.on, at)
			}
			mounted["u"] = h.on
		}
		if len(mounted) > 1 {
			wrong("mounted by %v", mounted)
		}
	}
	end := func(done int) {
		if h.has >= 0 && (h.by != "u" || h.on != h.has) && done > h.has && done >= h.ends {
			delete(mounted, h.by) // its node reports that it has no such pod
		}
	}
	settle()
	if h.over {
		s.UnrecordedNodeWait = 0
		settle()
	}
	for i, what := range h.becomes {
		at := slices.IndexFunc(s.Nodes, func(n *corev1.Node) bool { return n.Name == nodeName(i) })
		switch what {
		case heard:
			delete(s.Nodes[at].Annotations, api.AnnotationUnconfirmed)
		case deleted:
			s.Nodes = slices.Delete(s.Nodes, at, at+1)
			s.Users = slices.DeleteFunc(s.Users, func(u User) bool { return u.Pod.Spec.NodeName == nodeName(i) })
		case dead:
			s.Nodes[at].Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService}}
		}
		if what != heard && h.has == i {
			delete(mounted, h.by)
		}
		settle()
		end(i + 1)
		settle()
	}
	s.UnrecordedNodeWait = 0
	settle()
	end(10)
	settle()
	if api.IsUnconfirmed(v) {
		wrong("it waits for ever: %s", s.waitingReason())
	}
	if h.on >= 0 && h.becomes[h.on] == heard && mounted["u"] != h.on {
		wrong("its pod does not get it")
	}
	return good
}

// After a restore, a single-pod volume that is not attached is mounted for the pod of the store
// only when no other pod has it on any node. The other pod may be absent from the store, or be the
// same pod bound to another node. At the end the pod of the store has it. F110
func TestNoVolumeIsOfTwoPodsAfterARestore(t *testing.T) {
	fates := []string{heard, deleted, dead}
	count, bad := 0, 0
	for i := range 4 * 4 * 2 * 3 * 27 * 4 * 2 {
		next := func(n int) (out int) { out, i = i%n, i/n; return out }
		h := soleHistory{on: next(4) - 1, has: next(4) - 1, by: []string{"u", "gone"}[next(2)]}
		how := next(3)
		h.former, h.otherVolume = how == 1, how == 2
		for i := range h.becomes {
			h.becomes[i] = fates[next(3)]
		}
		h.ends, h.over = next(4), next(2) == 1
		if h.has < 0 && (h.by == "u" || how > 0 || h.ends > 0) {
			continue // equal to another history
		}
		count++
		if !h.play(t) {
			if bad++; bad == 5 {
				t.Fatal("and so on")
			}
		}
	}
	t.Logf("%d histories", count)
}

// The text for which node a single-pod volume waits. A list that is invalid or too long may contain
// anything. F110
func TestWhomAVolumeOfOnePodWaitsFor(t *testing.T) {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}
	for _, c := range []struct {
		annotations map[string]string
		strangers   time.Duration
		want        string
	}{
		{nil, 0, ""},
		{map[string]string{api.AnnotationClaimsHeld: "[]"}, 0, ""},
		{map[string]string{api.AnnotationClaimsHeld: "[]"}, time.Second,
			"a node that joined after the backup may use the volume"},
		{map[string]string{api.AnnotationClaimsHeld: "all"}, 0, "node w1 holds it for a deleted pod (uid any)"},
		{map[string]string{api.AnnotationClaimsHeld: `[{"pod":"p","claim":"c","volume":"v","since":1}]`}, 0,
			"(uid p): it is released when that pod has ended"},
		{map[string]string{api.AnnotationClaimsHeld: `[{"pod":"p","claim":"c","volume":"w"}]`}, 0, ""},
		{map[string]string{api.AnnotationClaimsHeld: `[{"pod":"p","claim":""}]`}, 0, ""},
		{map[string]string{api.AnnotationUnconfirmed: ""}, 0, "kubectl delete node w1"},
		{map[string]string{api.AnnotationFencesAfter: "20"}, 0,
			"node w1, which has just joined, has not reported the volumes of its pods yet"},
	} {
		got := singlePodVolume{Volume: v, UnrecordedNodeWait: c.strangers,
			Nodes: []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "w1",
				Annotations: c.annotations}}}}.waitingReason()
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%v: %q, want %q", c.annotations, got, c.want)
		}
	}
}
