package assign

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
)

// A mirror pod's references are not sent to its node.
func TestMirrorPodsHaveNoReferences(t *testing.T) {
	class := "c"
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: v1.PodSpec{
		ServiceAccountName: "robot", ImagePullSecrets: []v1.LocalObjectReference{{Name: "s"}}, RuntimeClassName: &class,
	}}
	if got := objectReferences(p); len(got) != 3 {
		t.Errorf("an ordinary pod leads to %v", got)
	}
	p.Annotations = map[string]string{v1.MirrorPodAnnotationKey: "x"}
	if got := objectReferences(p); len(got) != 0 {
		t.Errorf("a mirror pod leads to %v", got)
	}
}

// An object is encoded once per revision for all sessions. Pods and Secrets are not cached.
func TestEncodings(t *testing.T) {
	e := newEncodings()
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "s", UID: "u", ResourceVersion: "3"}}
	one, err := e.encodeOnce(kindService, svc)
	if err != nil {
		t.Fatal(err)
	}
	if two, _ := e.encodeOnce(kindService, svc); two != one {
		t.Error("encoded twice at one revision")
	}
	next := svc.DeepCopy()
	next.ResourceVersion = "4"
	if three, _ := e.encodeOnce(kindService, next); three == one || three.Revision != 4 {
		t.Error("an old encoding was served")
	}
	back := &v1.Service{}
	if err := wire.DecodeObject(one.Raw, "Service", back); err != nil || back.Name != "s" {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if err := wire.DecodeObject(one.Raw, "Pod", &v1.Pod{}); err == nil {
		t.Error("a Service was decoded as a Pod")
	}
	e.forgetObject("u")
	if len(e.byUID) != 0 {
		t.Error("not forgotten")
	}
}

// Node fields that agents do not need are not sent, and their changes wake no session.
func TestSlimNode(t *testing.T) {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", UID: "u", ResourceVersion: "1"},
		Spec: v1.NodeSpec{PodCIDR: "10.0.1.0/24"}}
	n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}
	busy := n.DeepCopy()
	busy.Status.Images = []v1.ContainerImage{{Names: []string{"hello"}}}
	busy.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady}}
	busy.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("3"),
		v1.ResourceHugePagesPrefix + "2Mi": resource.MustParse("0")}
	if !equalSlimNodes(n, busy) {
		t.Error("a status alone wakes every agent")
	}
	enc, err := encodeObject(kindNode, busy)
	if err != nil {
		t.Fatal(err)
	}
	var got v1.Node
	if err := wire.DecodeObject(enc.Raw, "Node", &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Status.Images) > 0 || got.Spec.PodCIDR != n.Spec.PodCIDR || len(got.Status.Addresses) != 1 {
		t.Errorf("sent %+v", got)
	}
	for what, change := range map[string]func(*v1.Node){
		"CIDR":    func(n *v1.Node) { n.Spec.PodCIDR = "10.0.2.0/24" },
		"address": func(n *v1.Node) { n.Status.Addresses[0].Address = "192.0.2.2" },
		"an extended resource": func(n *v1.Node) {
			n.Status.Allocatable = v1.ResourceList{"example.com/dongle": resource.MustParse("1")}
		},
		"label": func(n *v1.Node) { n.Labels = map[string]string{"a": "b"} },
	} {
		other := n.DeepCopy()
		change(other)
		if equalSlimNodes(n, other) {
			t.Errorf("a change of %s does not travel", what)
		}
	}
}

// A node gets its attached volumes and the volumes in use known to the control plane. F110
func TestSlimNodeHasAttachedVolumes(t *testing.T) {
	n := &v1.Node{Status: v1.NodeStatus{VolumesInUse: []v1.UniqueVolumeName{"a"},
		VolumesAttached: []v1.AttachedVolume{{Name: "a"}},
		Conditions:      []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, Message: "m"}}}}
	slim := slimNode(n).Status
	if len(slim.VolumesInUse) != 1 || len(slim.VolumesAttached) != 1 || len(slim.Conditions) != 1 ||
		slim.Conditions[0].Message != "" {
		t.Errorf("%+v", slim)
	}
	for what, change := range map[string]func(*v1.NodeStatus){
		"volumes in use":   func(s *v1.NodeStatus) { s.VolumesInUse = nil },
		"attached volumes": func(s *v1.NodeStatus) { s.VolumesAttached = nil },
		"being lost":       func(s *v1.NodeStatus) { s.Conditions[0].Status = v1.ConditionUnknown },
	} {
		other := n.DeepCopy()
		if change(&other.Status); equalSlimNodes(n, other) {
			t.Errorf("a change of %s does not travel", what)
		}
	}
}

// A node gets the Secret for the iSCSI login of a claim's volume, only if the volume requires it.
// If the volume names no namespace, the Secret is in the claim's. F110
func TestISCSISecretsOfVolumes(t *testing.T) {
	pv := func(d v1.ISCSIPersistentVolumeSource) *v1.PersistentVolume {
		return &v1.PersistentVolume{Spec: v1.PersistentVolumeSpec{ClaimRef: &v1.ObjectReference{Namespace: "team",
			Name: "data"}, PersistentVolumeSource: v1.PersistentVolumeSource{ISCSI: &d}}}
	}
	for _, c := range []struct {
		disk v1.ISCSIPersistentVolumeSource
		want []key
	}{
		{v1.ISCSIPersistentVolumeSource{SessionCHAPAuth: true, SecretRef: &v1.SecretReference{Name: "chap"}},
			[]key{{kindSecret, "team", "chap"}}},
		{v1.ISCSIPersistentVolumeSource{DiscoveryCHAPAuth: true,
			SecretRef: &v1.SecretReference{Name: "chap", Namespace: "other"}}, []key{{kindSecret, "other", "chap"}}},
		{v1.ISCSIPersistentVolumeSource{SecretRef: &v1.SecretReference{Name: "chap"}}, nil},
	} {
		if got := volumeReferences(pv(c.disk)); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.disk, got, c.want)
		}
	}
}
