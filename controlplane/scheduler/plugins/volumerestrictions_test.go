package plugins_test

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins/volumerestrictions"
)

// owns gives a pod ephemeral volumes.
func owns(names ...string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Name = "web"
		for _, n := range names {
			p.Spec.Volumes = append(p.Spec.Volumes,
				v1.Volume{Name: n, VolumeSource: v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{}}})
		}
	}
}

func elsewhere(p *v1.Pod) { p.Namespace = "other" }

// A claim of ReadWriteOncePod serves one pod in the whole cluster, by however many volumes; a claim of an ephemeral volume
// is waited for, and used only when it was made for the pod.
func TestClaimsOfOnePod(t *testing.T) {
	st := newStorage()
	st.class("any", "csi.example", storagev1.VolumeBindingImmediate)
	for _, name := range []string{"sole", "shared", "web-taken", "web-made"} {
		st.volume(name, "any", "")
		st.claim(name, "any", name)
	}
	st.claims["sole"].Spec.AccessModes = []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}
	mine := pod(owns("made"))
	st.claims["web-made"].OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(mine, v1.SchemeGroupVersion.WithKind("Pod"))}
	const taken = "0/2 nodes are available: 2 node has pod using PersistentVolumeClaim with the same name and " +
		"ReadWriteOncePod access mode."
	for _, tt := range []placing{
		{"nobody uses it", pod(claims("sole")), []*framework.NodeInfo{node("a")}, "a"},
		{"used on one node", pod(claims("sole")),
			[]*framework.NodeInfo{node("a"), with(node("b"), pod(claims("sole")))}, taken},
		{"used by two volumes", pod(claims("sole", "sole")),
			[]*framework.NodeInfo{node("a"), with(node("b"), pod(claims("sole", "sole")))}, taken},
		{"its name in another namespace", pod(claims("sole")),
			[]*framework.NodeInfo{with(node("a"), pod(claims("sole"), elsewhere))}, "a"},
		{"a claim of many", pod(claims("shared")), []*framework.NodeInfo{with(node("a"), pod(claims("shared")))}, "a"},
		{"another claim", pod(claims("shared")), []*framework.NodeInfo{with(node("a"), pod(claims("sole")))}, "a"},
		{"missing", pod(claims("nope")), []*framework.NodeInfo{node("a")},
			`0/1 nodes are available: persistentvolumeclaim "nope" not found.`},
		{"still to be made", pod(owns("tmp")), []*framework.NodeInfo{node("a")},
			`0/1 nodes are available: waiting for ephemeral volume controller to create the ` +
				`persistentvolumeclaim "web-tmp".`},
		{"somebody else's", pod(owns("taken")), []*framework.NodeInfo{node("a")},
			"0/1 nodes are available: PVC default/web-taken was not created for pod default/web (pod is not owner)."},
		{"made for it", mine, []*framework.NodeInfo{node("a")}, "a"},
	} {
		tt.run(t, st)
	}
}

// Who waits for a claim is woken by its users that go and by the claim itself, and by nothing else.
func TestClaimHints(t *testing.T) {
	waits := pod(claims("sole"))
	plugin := volumerestrictions.Plugin{}
	claim := func(ns, name string) *v1.PersistentVolumeClaim {
		return &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	}
	for _, tt := range []struct {
		name  string
		event framework.Event
		obj   any
		want  bool
	}{
		{"a user went", framework.PodRemoved, pod(claims("other", "sole")), true},
		{"somebody went", framework.PodRemoved, pod(claims("other")), false},
		{"a user of another namespace went", framework.PodRemoved, pod(claims("sole"), elsewhere), false},
		{"the claim came", framework.ClaimChanged, claim("default", "sole"), true},
		{"another came", framework.ClaimChanged, claim("default", "other"), false},
		{"one of another namespace came", framework.ClaimChanged, claim("x", "sole"), false},
		{"a node came", framework.NodeAdded, node("a").Node, false},
	} {
		if got := plugin.MayHelp(tt.event, waits, tt.obj); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

// disk gives a pod a disk of an iSCSI target.
func disk(iqn string, lun int32, readOnly bool) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: "disk", VolumeSource: v1.VolumeSource{
			ISCSI: &v1.ISCSIVolumeSource{TargetPortal: "192.0.2.1", IQN: iqn, Lun: lun, ReadOnly: readOnly}}})
	}
}

// A disk of an iSCSI target is one pod's on a node, unless all read it only. F89
func TestDisksOfTargets(t *testing.T) {
	const none = "0/1 nodes are available: 1 node(s) had no available disk."
	other := func(p *v1.Pod) { p.Spec.Volumes[0].ISCSI.TargetPortal = "192.0.2.2" }
	for _, tt := range []placing{
		{"nobody has it", pod(disk("iqn.a", 1, false)), []*framework.NodeInfo{node("a")}, "a"},
		{"another pod writes to it", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 1, false)))}, none},
		{"another reads it", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 1, true)))}, none},
		{"this one reads it", pod(disk("iqn.a", 1, true)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 1, false)))}, none},
		{"by another portal", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 1, false), other))}, none},
		{"in capitals", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.A", 1, false)))}, none},
		{"both read it", pod(disk("iqn.a", 1, true)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 1, true)))}, "a"},
		{"another disk of the target", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 2, false)))}, "a"},
		{"another target", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.b", 1, false)))}, "a"},
		{"on another node", pod(disk("iqn.a", 1, false)),
			[]*framework.NodeInfo{with(node("a"), pod(disk("iqn.a", 1, false))), node("b")}, "b"},
	} {
		tt.run(t, newStorage())
	}
	plugin, waits := volumerestrictions.Plugin{}, pod(disk("iqn.a", 1, false))
	if !plugin.MayHelp(framework.PodRemoved, waits, pod(disk("iqn.a", 1, true))) ||
		plugin.MayHelp(framework.PodRemoved, waits, pod(disk("iqn.a", 2, false), elsewhere)) {
		t.Error("who waits for a disk is woken by others than those who had it")
	}
}
