package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// What drivers and nodes say of a claim's size has the names and states that Kubernetes knows.
func TestClaimGrowthStatus(t *testing.T) {
	claim := func(status string) *corev1.PersistentVolumeClaim {
		return kindstest.Load[*corev1.PersistentVolumeClaim](t,
			"{metadata: {name: a, namespace: b, resourceVersion: '7'}, spec: {accessModes: [ReadWriteOnce], "+
				"resources: {requests: {storage: 1Gi}}}, status: "+status+"}")
	}
	old := claim("{phase: Bound}")
	judged := kinds.All().ByType(old).Subresources["status"].ValidateUpdate
	right := "{phase: Bound, capacity: {storage: 1Gi}, allocatedResources: {storage: 2Gi, example.com/a: 1}, " +
		"allocatedResourceStatuses: {storage: NodeResizePending, example.com/a: ControllerResizeInfeasible}}"
	if errs := judged(claim(right), old); len(errs) > 0 {
		t.Error(errs)
	}
	kindstest.CheckErrors(t, "growth",
		judged(claim("{phase: Bound, capacity: {storage: -1}, allocatedResources: {storage: -1, cpu: 1}, "+
			"allocatedResourceStatuses: {'a b': NodeResizePending, storage: Grown}}"), old),
		`status.capacity[storage]: Invalid value: -1: must be a valid resource quantity`,
		`status.allocatedResourceStatuses: Invalid value: "a b"`,
		`status.allocatedResourceStatuses: Unsupported value: "storage": supported values: `+
			`"ControllerResizeInProgress"`,
		`status.allocatedResources: Unsupported value: "cpu": supported values: "storage"`,
		`status.allocatedResources[storage]: Invalid value: -1: must be a valid resource quantity`)
}

// A bound claim may want less again, as long as that is more than it has: growing may not have succeeded.
func TestClaimWantsLess(t *testing.T) {
	bound := func(size string) *corev1.PersistentVolumeClaim {
		return kindstest.Load[*corev1.PersistentVolumeClaim](t,
			"{metadata: {name: a, namespace: b, resourceVersion: '7'}, spec: {accessModes: [ReadWriteOnce], "+
				"volumeName: v, resources: {requests: {storage: "+size+
				"}}}, status: {phase: Bound, capacity: {storage: 1Gi}}}")
	}
	judged := kinds.All().ByType(bound("1Gi")).Validation.Update
	if errs := judged(bound("2Gi"), bound("3Gi")); len(errs) > 0 {
		t.Error(errs)
	}
	if errs := judged(bound("4Gi"), bound("3Gi")); len(errs) > 0 {
		t.Error(errs)
	}
	kindstest.CheckErrors(t, "as small as it is", judged(bound("1Gi"), bound("3Gi")),
		"spec.resources.requests.storage: Forbidden: field can not be less than status.capacity: volumes do not "+
			"shrink; ask for more than the claim has, or make a smaller claim and copy the data")
}

// F110: a claim may name another class of attributes, and none as long as its volume has none.
func TestClaimsNameOtherAttributes(t *testing.T) {
	claim := func(class, has string) *corev1.PersistentVolumeClaim {
		c := kindstest.Load[*corev1.PersistentVolumeClaim](t,
			"{metadata: {name: a, namespace: b, resourceVersion: '7'}, spec: {accessModes: [ReadWriteOnce], "+
				"volumeName: v, resources: {requests: {storage: 1Gi}}}, status: {phase: Bound, capacity: "+
				"{storage: 1Gi}}}")
		if class != "nil" {
			c.Spec.VolumeAttributesClassName = &class
		}
		if has != "" {
			c.Status.CurrentVolumeAttributesClassName = &has
		}
		return c
	}
	for _, one := range []struct{ from, to, has, want string }{
		{"nil", "gold", "", ""},
		{"gold", "silver", "gold", ""},
		{"gold", "nil", "", ""},
		{"gold", "", "", ""},
		{"gold", "nil", "silver", "spec.volumeAttributesClassName: Forbidden: update to nil is forbidden when " +
			"status.currentVolumeAttributesClassName is not nil"},
		{"gold", "", "silver", "spec.volumeAttributesClassName: Forbidden: update to empty string is forbidden when " +
			"status.currentVolumeAttributesClassName is not nil"},
	} {
		errs := core.ValidateClaimUpdate(claim(one.to, one.has), claim(one.from, one.has))
		if got := errs.ToAggregate(); (got == nil) != (one.want == "") || got != nil && got.Error() != one.want {
			t.Errorf("from %q to %q with %q: %v", one.from, one.to, one.has, got)
		}
	}
}

// A volume has one class of attributes or another, and such has a driver.
func TestVolumesWithAttributes(t *testing.T) {
	const volume = "{metadata: {name: a}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], " +
		"persistentVolumeReclaimPolicy: Retain, volumeMode: Filesystem, csi: {driver: x.io, volumeHandle: v}, " +
		"volumeAttributesClassName: gold}}"
	name := func(class *string) func(v *corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) { v.Spec.VolumeAttributesClassName = class }
	}
	silver, empty := "silver", ""
	kindstest.CheckChanges(t, volume,
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: name(&silver), Want: ""},
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: name(nil),
			Want: "spec.volumeAttributesClassName: Forbidden: update from non-nil value to nil is forbidden"},
		kindstest.Change[*corev1.PersistentVolume]{Generation: 1, Change: name(&empty),
			Want: "spec.volumeAttributesClassName: Required value: an empty string is disallowed"},
	)
}
