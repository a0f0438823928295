package plugins_test

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// goesTo fails unless a pod is given a node, or refused it in these words.
func goesTo(t *testing.T, h *framework.Handle, pod *v1.Pod, node *framework.NodeInfo, want string) {
	t.Helper()
	res, err := schedule(profile(t, h), pod, node)
	got := res.Node
	if err != nil {
		got = err.Error()
	}
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// Volumes keep a pod to their zone, and off nodes that take no more of a driver's volumes.
func TestVolumeFilters(t *testing.T) {
	st := newStorage()
	st.class("fast", "csi.example", storagev1.VolumeBindingWaitForFirstConsumer)
	for _, name := range []string{"one", "two", "three"} {
		v := st.volume(name, "fast", "")
		v.Spec.CSI = &v1.CSIPersistentVolumeSource{Driver: "csi.example", VolumeHandle: name}
		st.claim(name, "fast", name)
	}
	st.claim("new", "fast", "")
	st.volumes["one"].Labels = map[string]string{v1.LabelTopologyZone: "x__y"}
	h := st.handle()
	h.VolumeLimits = func(node string) map[string]int32 {
		if node == "free" {
			return nil
		}
		return map[string]int32{"csi.example": 1, "other.example": 0}
	}
	zoned := func(name, z string) *framework.NodeInfo { return node(name, label(v1.LabelTopologyZone, z)) }
	const full = "0/1 nodes are available: 1 node(s) exceed max volume count."
	for _, tt := range []struct {
		name string
		pod  *v1.Pod
		node *framework.NodeInfo
		want string
	}{
		{"in the zone", pod(claims("one")), zoned("a", "y"), "a"},
		{"by the older label", pod(claims("one")), node("a", label(v1.LabelFailureDomainBetaZone, "x")), "a"},
		{"in another zone", pod(claims("one")), zoned("a", "z"),
			"0/1 nodes are available: 1 node(s) had no available volume zone."},
		{"without zones", pod(claims("one")), node("a"), "a"},
		{"no volume there", pod(claims("two")), node("a"), "a"},
		{"as many as it takes", pod(claims("two")), with(node("a"), pod(claims("three"))), full},
		{"the same volume", pod(claims("two")), with(node("a"), pod(claims("two"))), "a"},
		{"one to be made", pod(claims("new")), with(node("a"), pod(claims("three"))), full},
		{"two at once", pod(claims("two", "three")), node("a"), full},
		{"a node without limits", pod(claims("two", "three")), with(node("free"), pod(claims("new"))), "free"},
		{"no claims", pod(), with(node("a"), pod(claims("three"))), "a"},
	} {
		t.Run(tt.name, func(t *testing.T) { goesTo(t, h, tt.pod, tt.node, tt.want) })
	}
}

// A volume that is to be made of a snapshot, or of another volume, is made where that is.
func TestOriginsOfVolumes(t *testing.T) {
	st := newStorage()
	st.class("late", "csi.example", storagev1.VolumeBindingWaitForFirstConsumer)
	from := func(name, text string) {
		st.claim(name, "late", "").Annotations = map[string]string{"keelson.dev/reached-from": text}
	}
	from("there",
		`{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"disk","operator":"In","values":["there"]}]}]}}`)
	from("anywhere", `null`)
	from("garbled", `{"required":`)
	st.claim("empty", "late", "")
	const elsewhere = "0/1 nodes are available: 1 node(s) didn't reach what the claim's volume is to be made of."
	for _, tt := range []struct{ claim, disk, want string }{
		{"there", "there", "a"},
		{"there", "here", elsewhere},
		{"anywhere", "here", "a"},
		{"garbled", "here", "a"}, // who makes it says so
		{"empty", "here", "a"},
	} {
		res, err := schedule(profile(t, st.handle()), pod(claims(tt.claim)), node("a", label("disk", tt.disk)))
		got := res.Node
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%s on a node with the disk %q: got %s, want %s", tt.claim, tt.disk, got, tt.want)
		}
	}
}

// A volume is made only where its driver has room, for drivers that say how much they have.
func TestRoomForVolumes(t *testing.T) {
	st := newStorage()
	st.class("told", "told.example", storagev1.VolumeBindingWaitForFirstConsumer)
	st.class("silent", "silent.example", storagev1.VolumeBindingWaitForFirstConsumer)
	st.claim("a", "told", "")
	st.claim("b", "told", "")
	st.claim("silent", "silent", "")
	st.claim("begun", "told", "").Annotations = map[string]string{"volume.kubernetes.io/selected-node": "full"}
	h := st.handle()
	room := func(class, zone, capacity, most string) *storagev1.CSIStorageCapacity {
		q := resource.MustParse(capacity)
		c := &storagev1.CSIStorageCapacity{StorageClassName: class, Capacity: &q,
			NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"zone": zone}}}
		if most != "" {
			q := resource.MustParse(most)
			c.MaximumVolumeSize = &q
		}
		return c
	}
	all := []*storagev1.CSIStorageCapacity{room("told", "full", "1023Mi", ""), room("told", "one", "1Gi", ""),
		room("told", "two", "2Gi", ""),
		room("told", "small", "9Gi", "512Mi"), room("other", "full", "9Gi", "")}
	h.Volumes.PublishesCapacity = func(driver string) bool { return driver == "told.example" }
	h.Volumes.StorageCapacities = func(class string) (out []*storagev1.CSIStorageCapacity) {
		for _, c := range all {
			if c.StorageClassName == class {
				out = append(out, c)
			}
		}
		return out
	}
	const full = "0/1 nodes are available: 1 node(s) did not have enough free storage."
	none := room("told", "none", "0", "")
	none.Annotations = map[string]string{api.NoRoomAnnotation: "its disk has no project quotas"}
	all = append(all, none)
	at := func(zone string) *framework.NodeInfo { return node(zone, label("zone", zone)) }
	for _, tt := range []struct {
		name string
		pod  *v1.Pod
		node *framework.NodeInfo
		want string
	}{
		{"less than is wanted", pod(claims("a")), at("full"), full},
		{"as much as is wanted", pod(claims("a")), at("one"), "one"},
		{"for one of two", pod(claims("a", "b")), at("one"), full},
		{"for both", pod(claims("a", "b")), at("two"), "two"},
		{"no volume as large", pod(claims("a")), at("small"), full},
		{"it can have none, for a reason", pod(claims("a")), at("none"),
			"0/1 nodes are available: 1 node(s) can have no volumes of StorageClass told: its disk has no " +
				"project quotas."},
		{"nobody has said", pod(claims("a")), at("unknown"), full},
		{"a driver that says nothing", pod(claims("silent")), at("full"), "full"},
		{"it is being made there", pod(claims("begun")), at("full"), "full"},
	} {
		t.Run(tt.name, func(t *testing.T) { goesTo(t, h, tt.pod, tt.node, tt.want) })
	}
}
