package volumeattach

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

const driver = "disk.example"

// disk is a PersistentVolume of the volume.
func disk(modes ...corev1.PersistentVolumeAccessMode) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}
	v.Spec.AccessModes = modes
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: "h"}
	return v
}

// user returns a pod; its name determines its age.
func user(name, node string, going bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
		Spec: corev1.PodSpec{NodeName: node}}
	if going {
		p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	}
	return p
}

// to is an attachment, of which state names: "attached", "going".
func to(node string, state ...string) *storagev1.VolumeAttachment {
	a := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: api.AttachmentName("h", driver, node),
		Annotations: map[string]string{handleAnnotation: "h"}}}
	a.Spec.Attacher, a.Spec.NodeName = driver, node
	a.Status.Attached = slices.Contains(state, "attached")
	if slices.Contains(state, "going") {
		a.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	}
	return a
}

// host returns a node; uses selects whether it reports that it uses the volume.
func host(name string, uses bool) Host {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if uses {
		n.Status.VolumesInUse = []corev1.UniqueVolumeName{"kubernetes.io/csi/disk.example^h"}
	}
	return Host{Node: n}
}

// told returns a node whose agent reports its mounted volumes; held is its report about the volume.
func told(h Host, held string) Host {
	h.Node = h.Node.DeepCopy()
	h.Node.Annotations = map[string]string{api.AnnotationVolumesHeld: held}
	return h
}

func holds(h Host, it bool) Host {
	if it {
		return told(h, `["kubernetes.io/csi/disk.example^h"]`)
	}
	return told(h, `["kubernetes.io/csi/disk.example^another"]`)
}

// by names a PersistentVolume with another name.
func by(volume string) string {
	if volume == "v" {
		return ""
	}
	return " by " + volume
}

// given is a State with a single PersistentVolume.
type given struct {
	Volume             *corev1.PersistentVolume
	Required           bool
	Pods               []*corev1.Pod
	Attachments        []*storagev1.VolumeAttachment
	Hosts              map[string]Host
	UnrecordedNodeWait time.Duration
}

func (g given) state() State {
	in := State{Attacher: driver, Handle: "h", Required: g.Required, Attachments: g.Attachments, Hosts: g.Hosts,
		UnrecordedNodeWait: g.UnrecordedNodeWait}
	if g.Volume != nil {
		in.Volumes = []*corev1.PersistentVolume{g.Volume}
	}
	for _, p := range g.Pods {
		in.Users = append(in.Users, User{p, g.Volume})
	}
	return in
}

// show is a step in one line.
func show(s Step) string {
	var out []string
	for _, n := range s.Attach {
		out = append(out, "attach "+n.Pod.Spec.NodeName+by(n.Volume.Name))
	}
	for _, a := range s.Detach {
		out = append(out, "detach "+a.Spec.NodeName)
	}
	for _, n := range s.Listed {
		out = append(out, "listed "+n)
	}
	for _, p := range s.Remove {
		out = append(out, "remove "+p.Name)
	}
	for _, r := range s.Refused {
		out = append(out, r.Pod.Name+": "+strings.TrimPrefix(r.Message,
			`Multi-Attach error for volume "v": its access modes let one node have it, and `))
	}
	for _, v := range s.Settled {
		out = append(out, "settled "+v.Name)
	}
	if s.Again > 0 {
		out = append(out, fmt.Sprint("again ", s.Again))
	}
	return strings.Join(out, "; ")
}

var planOne, planMany = disk(corev1.ReadWriteOnce), disk(corev1.ReadWriteOnce, corev1.ReadWriteMany)

func planLostFor(left time.Duration) Host { h := host("w1", true); h.Fences = left; return h }

var planFenced = func() Host {
	h := host("w1", true)
	h.Fenced = true
	return h
}()

var planListed = func() Host {
	h := host("w1", true)
	h.Node.Status.VolumesAttached = []corev1.AttachedVolume{{Name: h.Node.Status.VolumesInUse[0]}}
	return h
}()

func planRestored(h Host) Host {
	h.Node.Annotations = map[string]string{api.AnnotationUnconfirmed: ""}
	return h
}

var planUnheard = "a: node w2 has not reported since a backup was restored: it may have the volume mounted (if its " +
	"machine no longer exists: kubectl delete node w2); again "

const planKeeps = "a: node w2 has it mounted, or may have it mounted, for pod default/b: it is detached when " +
	"that pod has ended"

func planPods(p ...*corev1.Pod) []*corev1.Pod { return p }

func planHas(a ...*storagev1.VolumeAttachment) []*storagev1.VolumeAttachment { return a }

// planCases are the cases of TestPlan.
var planCases = []struct {
	name string
	in   given
	want string
}{
	{"nobody", given{Volume: planOne, Required: true}, ""},
	{"a pod came", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false))}, "attach w1"},
	{"two of one node", given{Volume: planOne, Required: true,
		Pods: planPods(user("a", "w1", false), user("b", "w1", false))}, "attach w1"},
	{"its driver attaches nothing", given{Volume: planOne, Pods: planPods(user("a", "w1", false))}, ""},
	{"asked for", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
		Attachments: planHas(to("w1"))}, ""},
	{"attached", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
		Attachments: planHas(to("w1", "attached"))}, "listed w1"},
	{"wanted again while it goes", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
		Attachments: planHas(to("w1", "attached", "going"))}, ""},
	{"two nodes: the older pod's", given{Volume: planOne, Required: true,
		Pods: planPods(user("b", "w1", false), user("a", "w2", false))},
		"attach w2; b: node w2 holds it for pod default/a: it is released when that pod has ended"},
	{"two nodes may", given{Volume: planMany, Required: true,
		Pods: planPods(user("b", "w1", false), user("a", "w2", false))}, "attach w2; attach w1"},
	{"another has it", given{Volume: planOne, Required: true,
		Pods: planPods(user("a", "w1", false), user("b", "w2", false)), Attachments: planHas(to("w2", "attached"))},
		"listed w2; a: node w2 holds it for pod default/b: it is released when that pod has ended"},
	{"still mounted", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w2", false)),
		Attachments: planHas(to("w1", "attached")), Hosts: map[string]Host{"w1": host("w1", true)}},
		"listed w1; a: node w1 has not unmounted it yet"},
	{"unmounted", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w2", false)),
		Attachments: planHas(to("w1", "attached")), Hosts: map[string]Host{"w1": host("w1", false)}}, "detach w1"},
	{"on its way from there", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w2", false)),
		Attachments: planHas(to("w1", "attached", "going"))}, ""},
	{"never attached, wanted no more", given{Volume: planOne, Required: true, Attachments: planHas(to("w1")),
		Hosts: map[string]Host{"w1": host("w1", false)}}, "detach w1"},
	{"its node is lost", given{Volume: planOne, Required: true,
		Pods: planPods(user("a", "w1", true), user("b", "w2", false)), Attachments: planHas(to("w1", "attached")),
		Hosts: map[string]Host{"w1": planLostFor(9 * time.Second)}},
		"listed w1; b: lost node w1 holds it for pod default/a until it is fenced, in 9s at the latest; again 9s"},
	{"its node is fenced", given{Volume: planOne, Required: true,
		Pods: planPods(user("a", "w1", true), user("b", "w2", false)), Attachments: planHas(to("w1", "attached")),
		Hosts: map[string]Host{"w1": planFenced}},
		"listed w1; remove a; b: node w1 holds it for pod default/a: it is released when that pod has ended"},
	{"nobody of a fenced node is left", given{Volume: planOne, Required: true,
		Attachments: planHas(to("w1", "attached")),
		Hosts:       map[string]Host{"w1": planFenced}}, "detach w1"},
	{"a pod that stays on a fenced node", given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
		Attachments: planHas(to("w1", "attached")),
		Hosts:       map[string]Host{"w1": planFenced}}, "listed w1"},
	{"its node is gone", given{Volume: planOne, Required: true, Attachments: planHas(to("w1", "attached")),
		Hosts: map[string]Host{"w1": {Fences: time.Second}}}, "listed w1; again 1s"},
	{"another uses it, and nothing says why",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts:       map[string]Host{"w2": host("w2", true)}},
		"a: node w2 has it mounted for a deleted pod: it is detached after the unmount"},
	{"another uses it, and nothing says why: nobody gets it",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Hosts: map[string]Host{"w2": host("w2", true)}},
		"a: node w2 has it mounted for a deleted pod: it is detached after the unmount"},
	{"another uses it without a reason, of those that may",
		given{Volume: planMany, Required: true, Pods: planPods(user("a", "w1", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts:       map[string]Host{"w2": host("w2", true)}}, "listed w1"},
	{"a lost one uses it without a reason", given{Volume: planOne, Required: true,
		Pods:        planPods(user("a", "w2", false)),
		Attachments: planHas(to("w2", "attached")),
		Hosts:       map[string]Host{"w1": planLostFor(9 * time.Second)}},
		"a: node w1 has it mounted for a deleted pod: it is detached after the unmount; again 9s"},
	{"a fenced one used it without a reason",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w2", false)),
			Attachments: planHas(to("w2", "attached")),
			Hosts:       map[string]Host{"w1": planFenced}}, "listed w2"},
	{"another uses it without a reason, and its own node has it",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts:       map[string]Host{"w1": planListed, "w2": host("w2", true)}}, ""},
	{"another has not been heard since a restore",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts: map[string]Host{"w1": planRestored(host("w1", true)), "w2": planRestored(host("w2", false)),
				"w3": planRestored(host("w3", false))}}, planUnheard + "3s"},
	{"another has not been heard since a restore: nobody gets it",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Hosts: map[string]Host{"w2": planRestored(host("w2", false))}}, planUnheard + "3s"},
	{"a lost one has not been heard since a restore",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts:       map[string]Host{"w2": planRestored(planLostFor(9 * time.Second))}}, planUnheard + "9s"},
	{"a fenced one has not been heard since a restore, nor has its own",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts: map[string]Host{"w1": planRestored(host("w1", true)),
				"w2": {Node: planRestored(host("w2", false)).Node, Fenced: true}}}, "listed w1"},
	{"its own has not been heard since a restore, and wants it no more",
		given{Volume: planOne, Required: true, Attachments: planHas(to("w1")),
			Hosts: map[string]Host{"w1": planRestored(host("w1", false))}}, "again 3s"},
	{"others have not been heard since a restore, and may have it, too",
		given{Volume: planMany, Required: true, Pods: planPods(user("a", "w1", false)),
			Hosts: map[string]Host{"w2": planRestored(host("w2", false))}}, "attach w1"},
	{"both of two that wait say that they use it",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false), user("b", "w2", false)),
			Hosts: map[string]Host{"w1": host("w1", true), "w2": host("w2", true)}},
		"attach w1; b: node w1 holds it for pod default/a: it is released when that pod has ended"},
	{"another has it, and a pod: it is given to that",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false), user("b", "w2", false)),
			Hosts: map[string]Host{"w1": holds(host("w1", true), false), "w2": holds(host("w2", true), true)}},
		"attach w2; " + planKeeps},
	{"another has it, and a pod: what the store had given goes",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false), user("b", "w2", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts: map[string]Host{"w1": holds(host("w1", true), false),
				"w2": holds(host("w2", true), true)}},
		"detach w1; " + planKeeps},
	{"another says that it has it, and a node that was told so keeps it",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false), user("b", "w2", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts:       map[string]Host{"w1": holds(planListed, true), "w2": holds(host("w2", true), true)}},
		"b: node w1 holds it for pod default/a: it is released when that pod has ended"},
	{"one that was lost may have it, and waits for the other",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false), user("b", "w2", false)),
			Attachments: planHas(to("w1", "attached")),
			Hosts:       map[string]Host{"w1": planRestored(host("w1", true)), "w2": holds(host("w2", true), true)}},
		planKeeps + "; b: node w1 has not reported since a backup was restored: it may have the volume mounted (if " +
			"its machine no longer exists: kubectl delete node w1); again 3s"},
	{"another waited for a pod that is gone",
		given{Volume: planOne, Required: true, Pods: planPods(user("a", "w1", false)),
			Hosts: map[string]Host{"w2": holds(host("w2", true), false)}}, "attach w1"},
	{"another has more than it can tell", given{Volume: planOne, Required: true,
		Pods:  planPods(user("a", "w1", false), user("b", "w2", false)),
		Hosts: map[string]Host{"w1": holds(host("w1", true), false), "w2": told(host("w2", true), "all")}},
		"attach w2; " + planKeeps},
	{"the volume is gone, and mounted", given{Attachments: planHas(to("w1", "attached")),
		Hosts: map[string]Host{"w1": host("w1", true)}}, "listed w1"},
	{"the volume is gone", given{Attachments: planHas(to("w1", "attached")),
		Hosts: map[string]Host{"w1": host("w1", false)}}, "detach w1"},
}

// F110: which node has a volume, and which node gets it next.
func TestPlan(t *testing.T) {
	for _, c := range planCases {
		if got := show(PlanVolume(c.in.state())); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
}

// F110: PersistentVolumes of the same volume count as one volume. A node that has it has it through
// all of them. Another node does not get it if the access modes of any of them allow only one node.
func TestPlanOfVolumesThatShowTheSame(t *testing.T) {
	named := func(name string, v *corev1.PersistentVolume) *corev1.PersistentVolume { v.Name = name; return v }
	one, other := disk(corev1.ReadWriteOnce), named("other", disk(corev1.ReadWriteOnce))
	many, wide := named("many", disk(corev1.ReadWriteMany)), named("wide", disk(corev1.ReadOnlyMany))
	of := func(v *corev1.PersistentVolume, node string, state ...string) *storagev1.VolumeAttachment {
		a := to(node, state...)
		a.Spec.Source.PersistentVolumeName = &v.Name
		return a
	}
	uses := func(name, node string, v *corev1.PersistentVolume) User { return User{user(name, node, false), v} }
	const same = `Multi-Attach error for volume "other": it has the same storage as volume "v" (volume h of CSI ` +
		`driver disk.example), `
	const modes = "its access modes let one node have it, and "
	for _, c := range []struct {
		name  string
		users []User
		has   []*storagev1.VolumeAttachment
		hosts map[string]Host
		want  string
	}{
		{"two of one node", []User{uses("a", "w1", one), uses("b", "w1", other)}, nil, nil, "attach w1"},
		{"its node has it by the other", []User{uses("b", "w1", other)},
			[]*storagev1.VolumeAttachment{of(one, "w1", "attached")}, nil, "listed w1"},
		{"two nodes: the older pod's", []User{uses("a", "w1", one), uses("b", "w2", other)}, nil, nil,
			"attach w1; b: " + same + modes + "node w1 holds it for pod default/a: it is released when " +
				"that pod has ended"},
		{"two nodes: the older pod's, by the other", []User{uses("b", "w1", other), uses("c", "w2", other)}, nil, nil,
			`attach w1 by other; c: Multi-Attach error for volume "other": ` + modes +
				"node w1 holds it for pod default/b: it is released when that pod has ended"},
		{"another has it", []User{uses("b", "w1", one), uses("a", "w2", other)},
			[]*storagev1.VolumeAttachment{of(one, "w1", "attached")}, nil,
			"listed w1; a: " + same + modes + "node w1 holds it for pod default/b: it is released when " +
				"that pod has ended"},
		{"still mounted", []User{uses("a", "w2", other)}, []*storagev1.VolumeAttachment{of(one, "w1", "attached")},
			map[string]Host{"w1": host("w1", true)},
			"listed w1; a: " + same + modes + "node w1 has not unmounted it yet"},
		{"unmounted", []User{uses("a", "w2", other)}, []*storagev1.VolumeAttachment{of(one, "w1", "attached")},
			map[string]Host{"w1": host("w1", false)}, "detach w1"},
		{"on its way from there", []User{uses("a", "w2", other)},
			[]*storagev1.VolumeAttachment{of(one, "w1", "attached", "going")}, nil, ""},
		{"all say that many may", []User{uses("a", "w1", many), uses("b", "w2", wide)}, nil, nil,
			"attach w1 by many; attach w2 by wide"},
		{"the other says that one may", []User{uses("a", "w1", one), uses("b", "w2", many)}, nil, nil,
			`attach w1; b: Multi-Attach error for volume "many": ` +
				`it has the same storage as volume "v" (volume h of CSI driver disk.example), the access ` +
				`modes of volume ` +
				`"v" let one node have it, and node w1 holds it for pod default/a: it is released when ` +
				`that pod has ended`},
		{"the other said that one may, and goes", []User{uses("b", "w2", many)},
			[]*storagev1.VolumeAttachment{of(one, "w1", "attached", "going")}, nil, ""},
		{"it was attached by one that said that one may", []User{uses("a", "w1", wide), uses("b", "w2", many)},
			[]*storagev1.VolumeAttachment{of(one, "w1", "attached")}, nil,
			"attach w2 by many; listed w1"},
	} {
		in := State{Attacher: driver, Handle: "h", Volumes: []*corev1.PersistentVolume{one, other, many, wide},
			Required: true, Users: c.users, Attachments: c.has, Hosts: c.hosts}
		if got := show(PlanVolume(in)); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
}

// F110: a node is fenced when its own time has passed, measured by this leader's clock only.
func TestSilences(t *testing.T) {
	s := &fenceTracker{since: map[string]time.Time{}}
	at := func(sec int) time.Time { return time.Unix(int64(sec), 0) }
	node := func(ready corev1.ConditionStatus, after string, taints ...string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}}}
		if after != "" {
			n.Annotations = map[string]string{api.AnnotationFencesAfter: after}
		}
		for _, k := range taints {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: k})
		}
		return n
	}
	silent := node(corev1.ConditionUnknown, "20")
	for i, c := range []struct {
		node   *corev1.Node
		at     int
		fenced bool
		in     int
	}{
		{node(corev1.ConditionTrue, "20"), 0, false, 0},
		{silent, 10, false, 25},
		{silent, 34, false, 1},
		{silent, 35, true, 0},
		{node(corev1.ConditionFalse, "20"), 36, false, 0}, // it speaks
		{silent, 37, false, 25},
		{node(corev1.ConditionUnknown, "20", corev1.TaintNodeOutOfService), 38, true, 0},
		{node(corev1.ConditionTrue, "20", corev1.TaintNodeOutOfService), 39, false, 0}, // alive
		{node(corev1.ConditionUnknown, "0"), 40, false, 0},                             // never by itself
		{node(corev1.ConditionUnknown, ""), 4000, false, 0},
		{nil, 5000, false, 40},
		{nil, 5040, true, 0},
	} {
		h := s.assessNode("w1", c.node, at(c.at))
		if h.Fenced != c.fenced || h.Fences != time.Duration(c.in)*time.Second {
			t.Errorf("step %d: fenced %v, in %s", i, h.Fenced, h.Fences)
		}
	}
}

// F110: a driver never has two attachers, and the attacher that published a volume unpublishes it.
func TestDuty(t *testing.T) {
	mine, theirs := []string{finalizer}, []string{foreign + "disk-example"}
	for _, c := range []struct {
		name       string
		finalizers []string
		state      string
		served     bool
		want       attachmentTask
	}{
		{"new", nil, "", true, recordIntent},
		{"new, of another's driver", nil, "", false, noTask},
		{"held", mine, "", true, publishTask},
		{"attached", mine, "attached", true, noTask},
		{"a sidecar is at work as well", theirs, "", true, attacherClash},
		{"a sidecar's", theirs, "", false, noTask},
		{"going", mine, "going", true, unpublishTask},
		{"going, and a sidecar has taken over", append(theirs, mine...), "going", false, unpublishTask},
		{"going, a sidecar's", theirs, "going", true, noTask},
		{"gone", nil, "going", true, noTask},
	} {
		a := to("w1", c.state)
		a.Finalizers = c.finalizers
		if got := attachmentDuty(a, c.served); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}
