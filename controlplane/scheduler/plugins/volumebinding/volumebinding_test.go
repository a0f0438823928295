package volumebinding

import (
	"context"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// objects are the storage objects of a test.
type objects struct {
	claims  map[string]*v1.PersistentVolumeClaim
	volumes map[string]*v1.PersistentVolume
	classes map[string]*storagev1.StorageClass
	room    []*storagev1.CSIStorageCapacity // nil: the driver publishes no capacity
}

func (o *objects) newPlugin() *Plugin {
	h := &framework.Handle{Volumes: framework.Volumes{
		Claim: func(_, name string) (*v1.PersistentVolumeClaim, bool) {
			c, ok := o.claims[name]
			return c, ok
		},
		PersistentVolume: func(name string) (*v1.PersistentVolume, bool) { v, ok := o.volumes[name]; return v, ok },
		PersistentVolumes: func() (all []*v1.PersistentVolume) {
			for _, v := range o.volumes {
				all = append(all, v)
			}
			return all
		},
		StorageClass:      func(name string) (*storagev1.StorageClass, bool) { c, ok := o.classes[name]; return c, ok },
		PublishesCapacity: func(string) bool { return o.room != nil },
		StorageCapacities: func(string) []*storagev1.CSIStorageCapacity { return o.room },
	}}
	return New(h, NewPromises(), DefaultPatience)
}

func newClaim(name, class, volumeName string) *v1.PersistentVolumeClaim {
	c := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
		UID: types.UID("claim-" + name), Annotations: map[string]string{}}}
	c.Spec.StorageClassName, c.Spec.VolumeName = &class, volumeName
	c.Spec.AccessModes = []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}
	c.Spec.Resources.Requests = v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	if volumeName != "" {
		c.Status.Phase = v1.ClaimBound
	}
	return c
}

func newVolume(name, class, node string) *v1.PersistentVolume {
	v := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
	v.Spec.StorageClassName = class
	v.Spec.AccessModes = []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}
	v.Spec.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	v.Status.Phase = v1.VolumeAvailable
	v.Spec.NodeAffinity = &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn,
			Values: []string{node}}}}}}}
	return v
}

func newClass(name, provisioner string) *storagev1.StorageClass {
	late := storagev1.VolumeBindingWaitForFirstConsumer
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner,
		VolumeBindingMode: &late}
}

func newNode(name string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}}}
}

func newCycle(uid types.UID, node *v1.Node, claims ...string) (*framework.Cycle, *framework.NodeInfo) {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p-" + string(uid), UID: uid},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c"}}}}
	for _, name := range claims {
		p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: name, VolumeSource: v1.VolumeSource{
			PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}}})
	}
	n := &framework.NodeInfo{}
	n.SetNode(node)
	return framework.NewCycle(framework.NewPodInfo(p), framework.NewSnapshot(n)), n
}

func TestNodesForClaims(t *testing.T) {
	for name, c := range map[string]struct {
		change func(o *objects)
		want   *framework.Status // nil: the node is accepted
	}{
		"a claim that can be provisioned": {func(*objects) {}, nil},
		"a bound volume of the node": {func(o *objects) {
			o.claims["data"] = newClaim("data", "late", "v")
			o.volumes["v"] = newVolume("v", "late", "n1")
		}, nil},
		"a bound volume of another node": {func(o *objects) {
			o.claims["data"] = newClaim("data", "late", "v")
			o.volumes["v"] = newVolume("v", "late", "n2")
		}, wrongNode},
		"a class without a provisioner": {func(o *objects) { o.classes["late"].Provisioner = noProvisioner }, noVolume},
		"an available volume of the node": {func(o *objects) {
			o.classes["late"].Provisioner = noProvisioner
			o.volumes["v"] = newVolume("v", "late", "n1")
		}, nil},
		"an available volume of another node": {func(o *objects) {
			o.classes["late"].Provisioner = noProvisioner
			o.volumes["v"] = newVolume("v", "late", "n2")
		}, noVolume},
		"provisioning on another node has started": {func(o *objects) {
			o.claims["data"].Annotations[volume.AnnSelectedNode] = "n2"
		}, wrongNode},
		"a data source on another node": {func(o *objects) {
			o.claims["data"].Annotations[reachedFrom] =
				`{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"kubernetes.io/hostname",` +
					`"operator":"In","values":["n2"]}]}]}}`
		}, elsewhere},
		"a topology that the class does not allow": {func(o *objects) {
			o.classes["late"].AllowedTopologies = []v1.TopologySelectorTerm{
				{MatchLabelExpressions: []v1.TopologySelectorLabelRequirement{{Key: v1.LabelHostname,
					Values: []string{"n2"}}}}}
		}, topology},
		"a driver without capacity": {func(o *objects) { o.room = []*storagev1.CSIStorageCapacity{} }, full},
	} {
		o := &objects{claims: map[string]*v1.PersistentVolumeClaim{"data": newClaim("data", "late", "")},
			volumes: map[string]*v1.PersistentVolume{},
			classes: map[string]*storagev1.StorageClass{"late": newClass("late", "driver.example")}}
		c.change(o)
		p := o.newPlugin()
		cycle, node := newCycle("u", newNode("n1"), "data")
		if _, s := p.PreFilter(context.Background(), cycle); !s.OK() {
			t.Errorf("%s: PreFilter refuses the pod: %v", name, s)
			continue
		}
		if got := p.Filter(context.Background(), cycle, node); got != c.want {
			t.Errorf("%s: the status is %v, want %v", name, got, c.want)
		}
	}
}

func TestClaimsThatAPodWaitsFor(t *testing.T) {
	immediate := newClass("now", "driver.example")
	mode := storagev1.VolumeBindingImmediate
	immediate.VolumeBindingMode = &mode
	o := &objects{claims: map[string]*v1.PersistentVolumeClaim{}, volumes: map[string]*v1.PersistentVolume{},
		classes: map[string]*storagev1.StorageClass{"now": immediate}}
	o.claims["immediate"] = newClaim("immediate", "now", "")
	o.claims["deleted"] = newClaim("deleted", "now", "")
	o.claims["deleted"].DeletionTimestamp = &metav1.Time{}
	o.claims["lost"] = newClaim("lost", "now", "gone")
	o.claims["lost"].Status.Phase = v1.ClaimLost
	o.claims["dangling"] = newClaim("dangling", "now", "gone")
	for _, name := range []string{"absent", "immediate", "deleted", "lost", "dangling"} {
		cycle, _ := newCycle("u", newNode("n1"), name)
		if _, s := o.newPlugin().PreFilter(context.Background(), cycle); s.OK() {
			t.Errorf("a pod with a claim that is %s is not refused", name)
		}
	}
	cycle, _ := newCycle("u", newNode("n1"))
	if _, s := o.newPlugin().PreFilter(context.Background(), cycle); s != framework.SkipStatus {
		t.Errorf("a pod without claims: %v", s)
	}
}

// A volume that is chosen for a pod is not chosen for another pod until the first pod is bound or
// gives the volume back.
func TestVolumesArePromisedOnce(t *testing.T) {
	ctx := context.Background()
	o := &objects{claims: map[string]*v1.PersistentVolumeClaim{"a": newClaim("a", "late", ""),
		"b": newClaim("b", "late", "")},
		volumes: map[string]*v1.PersistentVolume{"v": newVolume("v", "late", "n1")},
		classes: map[string]*storagev1.StorageClass{"late": newClass("late", noProvisioner)}}
	p := o.newPlugin()
	first, node := newCycle("first", newNode("n1"), "a")
	second, _ := newCycle("second", newNode("n1"), "b")
	for _, c := range []*framework.Cycle{first, second} {
		if _, s := p.PreFilter(ctx, c); !s.OK() {
			t.Fatal(s)
		}
	}
	if s := p.Reserve(ctx, first, "n1"); !s.OK() {
		t.Fatal(s)
	}
	if s := p.Filter(ctx, first, node); s != nil {
		t.Errorf("the first pod loses its own volume: %v", s)
	}
	if s := p.Filter(ctx, second, node); s != noVolume {
		t.Errorf("the second pod gets the promised volume: %v", s)
	}
	p.Unreserve(ctx, first, "n1")
	if s := p.Filter(ctx, second, node); s != nil {
		t.Errorf("the volume is not released: %v", s)
	}
}

func TestRoomOfDrivers(t *testing.T) {
	here := &metav1.LabelSelector{MatchLabels: map[string]string{v1.LabelHostname: "n1"}}
	there := &metav1.LabelSelector{MatchLabels: map[string]string{v1.LabelHostname: "n2"}}
	size := func(s string) *resource.Quantity { q := resource.MustParse(s); return &q }
	readOnly := &storagev1.CSIStorageCapacity{NodeTopology: here}
	readOnly.Annotations = map[string]string{api.NoRoomAnnotation: "the disk is read-only"}
	for name, c := range map[string]struct {
		room []*storagev1.CSIStorageCapacity
		want string
	}{
		"no driver publishes capacity": {nil, ""},
		"enough": {[]*storagev1.CSIStorageCapacity{{NodeTopology: here, Capacity: size("1Gi")}},
			""},
		"too little": {[]*storagev1.CSIStorageCapacity{{NodeTopology: here,
			Capacity: size("1023Mi")}}, "node(s) did not have enough free storage"},
		"on another node": {[]*storagev1.CSIStorageCapacity{{NodeTopology: there, Capacity: size("9Gi")}},
			"node(s) did not have enough free storage"},
		"volumes must be smaller": {[]*storagev1.CSIStorageCapacity{{NodeTopology: here, Capacity: size("9Gi"),
			MaximumVolumeSize: size("1Mi")}}, "node(s) did not have enough free storage"},
		"a reason of the driver": {[]*storagev1.CSIStorageCapacity{readOnly},
			"node(s) can have no volumes of StorageClass late: the disk is read-only"},
	} {
		p := (&objects{room: c.room}).newPlugin()
		s := p.checkCapacity(waitingClaim{newClaim("data", "late", ""), newClass("late", "driver.example")},
			map[string]int64{}, newNode("n1"))
		if got := reasonOf(s); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	p := (&objects{room: []*storagev1.CSIStorageCapacity{{NodeTopology: here, Capacity: size("1Gi")}}}).newPlugin()
	wanted := map[string]int64{"late": 1}
	if s := p.checkCapacity(waitingClaim{newClaim("data", "late", ""), newClass("late", "driver.example")}, wanted,
		newNode("n1")); s != full {
		t.Errorf("two volumes of a pod are not added up: %v", s)
	}
}

func reasonOf(s *framework.Status) string {
	if s == nil {
		return ""
	}
	return strings.Join(s.Reasons, ", ")
}
