package volumeattach

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// history describes how a single-node volume was restored, and the events after that.
type history struct {
	waits    [3]int // each node's pod of the volume by its age; 0 = none
	late     bool   // the pods are bound after all nodes have reported
	attached int    // the node that has the attachment in the backup; -1 = none
	going    bool   // it is on its way from there
	has      int    // the node that has the volume mounted; -1 = none
	unknown  bool   // by a pod that is not in the backup
	becomes  [3]string
	// a node that joined after the backup and has the volume: when it connects, if it does; ""
	// means no such node
	stranger string
}

// stranger is the name of that node.
const stranger = "w4"

// When an unrecorded node connects: before or after the other nodes, or never, because it is
// partitioned and has stopped its pods when its time has passed.
const (
	early, late           = "comes early", "comes late"
	silentEarly, silently = "its time is over early", "its time is over late"
)

func (h history) String() string {
	return fmt.Sprintf("pods of ages %v (late %v), attached to %d (going %v), mounted on %d (by an unknown pod %v), "+
		"nodes become %v, one that joined since and has it %q", h.waits, h.late, h.attached, h.going, h.has, h.unknown,
		h.becomes, h.stranger)
}

// The fate of a node after a restore.
const (
	heard   = "heard"
	deleted = "deleted"
	dead    = "out of service"
)

// cluster is a restored cluster: the contents of its store, and the real state.
type cluster struct {
	t       *testing.T
	history history
	in      given
	mounted map[string]bool
	unknown string // the node on which a pod runs that is not in the store
	wrong   bool
}

func nodeName(i int) string { return fmt.Sprintf("w%d", i+1) }

func restoredCluster(t *testing.T, h history) *cluster {
	c := &cluster{t: t, history: h, mounted: map[string]bool{},
		in: given{Volume: disk(corev1.ReadWriteOnce), Required: true, Hosts: map[string]Host{}}}
	for i := range h.waits {
		n := host(nodeName(i), h.waits[i] > 0 || h.attached == i) // of the time of the backup
		n.Node.Annotations = map[string]string{api.AnnotationUnconfirmed: ""}
		c.in.Hosts[nodeName(i)] = n
	}
	if h.attached >= 0 {
		a := to(nodeName(h.attached), "attached")
		if h.going {
			a.DeletionTimestamp = &metav1.Time{}
		}
		c.in.Attachments = append(c.in.Attachments, a)
	}
	if h.stranger != "" {
		c.mounted[stranger] = true
		c.in.UnrecordedNodeWait = time.Minute
		c.in.Volume.Annotations = map[string]string{api.AnnotationUnconfirmed: ""}
	}
	if h.has >= 0 {
		c.mounted[nodeName(h.has)] = true
		if h.unknown {
			c.unknown = nodeName(h.has)
		}
	}
	return c
}

// bind binds the pods to their nodes; their names determine their ages.
func (c *cluster) bind() {
	for i, age := range c.history.waits {
		if age > 0 && c.in.Hosts[nodeName(i)].Node != nil {
			c.in.Pods = append(c.in.Pods, user(fmt.Sprint("p", age), nodeName(i), c.in.Hosts[nodeName(i)].Fenced))
		}
	}
}

func (c *cluster) podOn(node string) bool {
	return slices.ContainsFunc(c.in.Pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == node })
}

// speak performs one step of a connected node's agent: it reports what it uses and has, and mounts
// what is attached to it. It reports whether anything changed.
func (c *cluster) speak(node string) bool {
	h := c.in.Hosts[node]
	if h.Node == nil || h.Fenced || api.IsUnconfirmed(h.Node) || api.IsJoining(h.Node) {
		return false
	}
	if c.podOn(node) && c.in.state().isVolumeListed(node) &&
		slices.Contains(h.Node.Status.VolumesInUse, "kubernetes.io/csi/disk.example^h") {
		c.mounted[node] = true
	}
	n, held := host(node, c.mounted[node] || c.podOn(node)), []corev1.UniqueVolumeName{}
	n.Node.Status.VolumesAttached = h.Node.Status.VolumesAttached
	if c.mounted[node] {
		held = n.Node.Status.VolumesInUse
	}
	told, err := json.Marshal(held)
	if err != nil {
		c.t.Fatal(err)
	}
	n.Node.Annotations = map[string]string{api.AnnotationVolumesHeld: string(told)}
	c.in.Hosts[node] = n
	return h.Node.Annotations[api.AnnotationVolumesHeld] != string(told) ||
		!slices.Equal(h.Node.Status.VolumesInUse, n.Node.Status.VolumesInUse)
}

// grant judges a step by which a node is to have the volume.
func (c *cluster) grant(what, node string) {
	if c.mounted[stranger] && node != stranger {
		c.wrong = true
		c.t.Errorf("%s %s while %s, which joined since, has it: %s", what, node, stranger, c.history)
	}
	for other, h := range c.in.Hosts {
		if other == node || h.Node == nil || h.Fenced || !api.IsUnconfirmed(h.Node) && !c.mounted[other] {
			continue
		}
		c.wrong = true
		c.t.Errorf("%s %s while %s may have it: %s", what, node, other, c.history)
	}
}

// settle runs the controller and the nodes until nothing changes.
func (c *cluster) settle() {
	for range 30 {
		step := PlanVolume(c.in.state())
		attachments, news := len(c.in.Attachments), len(step.Remove)+len(step.Attach) > 0
		c.explained(step)
		for _, p := range step.Remove {
			c.in.Pods = slices.DeleteFunc(c.in.Pods, func(o *corev1.Pod) bool { return o == p })
		}
		c.in.Attachments = slices.DeleteFunc(c.in.Attachments, func(a *storagev1.VolumeAttachment) bool {
			h := c.in.Hosts[a.Spec.NodeName]
			goes := a.DeletionTimestamp != nil && (h.Node == nil || h.Fenced || !api.IsUnconfirmed(h.Node)) ||
				slices.Contains(step.Detach, a)
			if goes && h.Node != nil {
				if c.mounted[a.Spec.NodeName] && !h.Fenced && a.DeletionTimestamp == nil {
					c.wrong = true
					c.t.Errorf("taken from %s, which has it mounted: %s", a.Spec.NodeName, c.history)
				}
				h.Node.Status.VolumesAttached = nil
			}
			return goes
		})
		news = news || attachments != len(c.in.Attachments)
		for _, u := range step.Attach {
			c.grant("attached to", u.Pod.Spec.NodeName)
			c.in.Attachments = append(c.in.Attachments, to(u.Pod.Spec.NodeName, "attached"))
		}
		for _, node := range step.Listed {
			if h := c.in.Hosts[node]; h.Node != nil && len(h.Node.Status.VolumesAttached) == 0 {
				c.grant("listed on", node)
				news = true
				h.Node.Status.VolumesAttached = []corev1.AttachedVolume{{Name: "kubernetes.io/csi/disk.example^h"}}
			}
		}
		for range step.Settled {
			news, c.in.Volume.Annotations = true, nil
		}
		for i := range len(c.history.waits) + 1 {
			news = c.speak(nodeName(i)) || news
		}
		if len(c.mounted) > 1 {
			c.wrong = true
			c.t.Errorf("mounted on %v: %s", c.mounted, c.history)
		}
		if c.wrong || !news {
			return
		}
	}
	c.wrong = true
	c.t.Errorf("it does not come to rest: %s", c.history)
}

// explained checks that the event of a pod that waits for unheard nodes names one of them, and the
// remedy.
func (c *cluster) explained(step Step) {
	for _, r := range step.Refused {
		if !strings.Contains(r.Message, "node w") &&
			!strings.Contains(r.Message, "a node that joined after the backup") ||
			strings.Contains(r.Message, "not reported since") && !strings.Contains(r.Message, "kubectl delete node w") {
			c.t.Errorf("pod %s gets the message %q: %s", r.Pod.Name, r.Message, c.history)
		}
	}
	for _, p := range c.in.Pods {
		told := slices.ContainsFunc(step.Refused, func(r Refusal) bool { return r.Pod == p })
		if c.in.UnrecordedNodeWait > 0 && !told {
			c.t.Errorf("%s is not told that it waits for nodes that are not known: %s", p.Name, c.history)
		}
		for other, h := range c.in.Hosts {
			if other != p.Spec.NodeName && h.Node != nil && !h.Fenced && api.IsUnconfirmed(h.Node) && !told {
				c.t.Errorf("%s is not told that it waits for %s: %s", p.Name, other, c.history)
			}
		}
	}
}

// become performs one node's fate: it connects, or a user reports that its machine is dead.
func (c *cluster) become(node, what string) {
	h := c.in.Hosts[node]
	switch what {
	case heard:
		delete(h.Node.Annotations, api.AnnotationUnconfirmed)
		c.speak(node)
	case deleted:
		c.in.Hosts[node] = Host{Fenced: true}
		c.in.Pods = slices.DeleteFunc(c.in.Pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == node })
		delete(c.mounted, node)
	case dead:
		h.Fenced = true
		c.in.Hosts[node] = h
		for i, p := range c.in.Pods {
			if p.Spec.NodeName == node {
				c.in.Pods[i] = user(p.Name, node, true) // they are evicted
			}
		}
		delete(c.mounted, node)
	}
	c.settle()
	if what == heard && c.unknown == node { // it unmounts volumes without pods
		delete(c.mounted, node)
		c.unknown = ""
		c.speak(node)
		c.settle()
	}
}

// come performs the fate of the unrecorded node. A node that connects exists before it has reported
// its volumes, and its time may pass meanwhile.
func (c *cluster) come(over bool) {
	switch c.history.stranger {
	case early, late:
		n := host(stranger, false)
		n.Node.Annotations = map[string]string{api.AnnotationFencesAfter: "20"}
		c.in.Hosts[stranger] = n
		if over {
			c.in.UnrecordedNodeWait = 0
		}
		c.settle()
		n.Node.Annotations[api.AnnotationVolumesInUse] = "told"
		c.speak(stranger)
		c.settle()
		c.in.UnrecordedNodeWait = 0
		c.settle()
		delete(c.mounted, stranger) // its pod is not in the backup
		c.speak(stranger)
	case silentEarly, silently:
		delete(c.mounted, stranger)
		c.in.UnrecordedNodeWait = 0
	}
	c.settle()
}

// granted checks that a node has the volume in the store and in its own report.
func (c *cluster) granted() bool {
	return slices.ContainsFunc(c.in.Attachments, func(a *storagev1.VolumeAttachment) bool {
		return a.DeletionTimestamp == nil && c.mounted[a.Spec.NodeName] && c.in.state().isVolumeListed(a.Spec.NodeName)
	})
}

// play runs a whole history. At the end a running node that has a pod has the volume.
func (h history) play(t *testing.T) bool {
	c := restoredCluster(t, h)
	if !h.late {
		c.bind()
	}
	c.settle()
	if h.stranger == early || h.stranger == silentEarly {
		c.come(h.late)
	}
	for i, what := range h.becomes {
		if c.wrong {
			return false
		}
		c.become(nodeName(i), what)
	}
	if h.stranger == late || h.stranger == silently {
		c.come(!h.late)
	}
	if h.late && !c.wrong {
		c.bind()
		c.settle()
		c.settle()
	}
	if c.wrong {
		return false
	}
	if api.IsUnconfirmed(c.in.Volume) {
		t.Errorf("the mark of the restore stays: %s", h)
		return false
	}
	for i, age := range h.waits {
		if age > 0 && h.becomes[i] == heard && !c.granted() {
			t.Errorf("nobody gets it: %s: %s", show(PlanVolume(c.in.state())), h)
			return false
		}
	}
	return true
}

// After a restore, no single-node volume is given to a node while another node that has not
// reported may have it, or has it. At the end, once all nodes have reported, are deleted or are out
// of service, a node gets it, regardless of which nodes had it, waited for it or were losing it.
// The same holds for a node that joined after the backup, until it connects or has stopped its pods
// by itself. F110
func TestNoVolumeIsOnTwoNodesAfterARestore(t *testing.T) {
	bad, count := 0, 0
	ages := [][3]int{{}, {1}, {0, 1}, {0, 0, 1}, {1, 2}, {2, 1}, {1, 0, 2}, {2, 0, 1}, {0, 1, 2}, {0, 2, 1}, {1, 2, 3},
		{1, 3, 2}, {2, 1, 3}, {2, 3, 1}, {3, 1, 2}, {3, 2, 1}}
	fates := []string{heard, deleted, dead}
	strangers := []string{"", early, late, silentEarly, silently}
	for i := range len(ages) * 7 * 7 * 2 * 27 * len(strangers) {
		next := func(n int) (out int) { out, i = i%n, i/n; return out }
		h := history{waits: ages[next(len(ages))]}
		at, has := next(7), next(7)
		h.attached, h.going = (at+1)/2-1, at > 0 && at%2 == 0
		h.has, h.unknown = (has+1)/2-1, has > 0 && has%2 == 0
		h.late = next(2) == 1
		for i := range h.becomes {
			h.becomes[i] = fates[next(3)]
		}
		if h.stranger = strangers[next(len(strangers))]; h.stranger != "" && h.has >= 0 {
			continue
		}
		if h.has >= 0 && h.waits[h.has] == 0 && !h.unknown || h.late && !h.unknown && h.has >= 0 {
			continue // a node that has it has it for some pod
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
