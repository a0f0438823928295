package volumeexpansion

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/csi/local"
)

func storage(size string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
}

// bound is a claim of 1Gi with its volume, and asks for as much as that.
func bound(asks, driver string) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data", UID: "c"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "v", Resources: corev1.VolumeResourceRequirements{Requests: storage(asks)}}}
	c.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("1Gi")}
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: corev1.PersistentVolumeSpec{
		Capacity: storage("1Gi"), ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "c"}}}
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver}
	return c, v
}

// grow takes steps until there is none, with the states that the claim was in.
func grow(t *testing.T, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) (steps []string) {
	for range 10 {
		s := Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0))
		switch {
		case s.Status != nil && s.Volume != nil:
			t.Fatal("two writes in one step")
		case s.Status != nil:
			c.Status = *s.Status
			steps = append(steps, string(c.Status.AllocatedResourceStatuses[corev1.ResourceStorage])+" "+s.Reason)
		case s.Volume != nil:
			v = s.Volume
			steps = append(steps, "volume")
		default:
			return steps
		}
	}
	t.Fatal("it does not come to rest")
	return nil
}

func TestOwnVolumesGrow(t *testing.T) {
	c, v := bound("3Gi", local.DriverName)
	want := []string{"ControllerResizeInProgress Resizing", "volume", " VolumeResizeSuccessful"}
	if steps := grow(t, c, v); !equality.Semantic.DeepEqual(steps, want) {
		t.Errorf("steps %q", steps)
	}
	wanted := corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("3Gi"), AllocatedResources: storage("3Gi")}
	if !equality.Semantic.DeepEqual(c.Status, wanted) {
		t.Errorf("%+v", c.Status)
	}
	// Half way the claim says what goes on, and another wish changes it.
	c, v = bound("3Gi", local.DriverName)
	c.Status = *Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0)).Status
	if n := len(c.Status.Conditions); n != 1 || c.Status.Conditions[0].Type != corev1.PersistentVolumeClaimResizing {
		t.Errorf("conditions %+v", c.Status.Conditions)
	}
	c.Spec.Resources.Requests = storage("5Gi")
	grow(t, c, v)
	if !equality.Semantic.DeepEqual(c.Status.Capacity, storage("5Gi")) || len(c.Status.Conditions) != 0 {
		t.Errorf("%+v", c.Status)
	}
	// Or it is taken back before the volume has grown.
	c, v = bound("3Gi", local.DriverName)
	c.Status = *Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0)).Status
	c.Spec.Resources.Requests = storage("1Gi")
	grow(t, c, v)
	wanted = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("1Gi"), AllocatedResources: storage("1Gi")}
	if !equality.Semantic.DeepEqual(c.Status, wanted) {
		t.Errorf("%+v", c.Status)
	}
}

// What is not the cluster's own, or no claim's, is left alone; who is waited for is told.
func TestOthersAreLeftAlone(t *testing.T) {
	for name, change := range map[string]func(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume){
		"nothing to grow": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Spec.Resources.Requests = storage("1Gi")
		},
		"not bound": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { c.Status.Phase = corev1.ClaimLost },
		"being deleted": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.DeletionTimestamp = &metav1.Time{}
		},
		"another one's volume": func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) { v.Spec.ClaimRef.UID = "other" },
		"another volume":       func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { c.Spec.VolumeName = "w" },
	} {
		for _, driver := range []string{local.DriverName, "other"} {
			c, v := bound("3Gi", driver)
			change(c, v)
			if s := Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0)); s != (Step{}) {
				t.Errorf("%s: %+v", name, s)
			}
		}
	}
	c, v := bound("3Gi", "other.example.com")
	c.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{corev1.ResourceStorage: corev1.PersistentVolumeClaimNodeResizePending}
	want := Step{Reason: "ExternalExpanding", Message: "waiting for an external controller to expand volume v to 3Gi: that of CSI driver other.example.com"}
	if s := Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0)); s != want {
		t.Errorf("%+v", s)
	}
	v.Spec.CSI, v.Spec.HostPath = nil, &corev1.HostPathVolumeSource{}
	want.Message = "waiting for an external controller to expand volume v to 3Gi: nothing in this cluster grows volumes of its kind"
	if s := Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0)); s != want {
		t.Errorf("%+v", s)
	}
	v.Spec.Capacity = storage("3Gi") // its resizer has been there: the rest is the node's
	if s := Plan(c, v, v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName, time.Unix(1, 0)); s != (Step{}) {
		t.Errorf("%+v", s)
	}
	if s := Plan(c, nil, false, time.Unix(1, 0)); s != (Step{}) {
		t.Errorf("%+v", s)
	}
}
