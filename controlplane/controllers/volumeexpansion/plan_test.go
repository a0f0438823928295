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

// bound returns a claim of 1Gi that requests another size, and its volume.
func bound(asks, driver string) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data", UID: "c"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "v",
			Resources: corev1.VolumeResourceRequirements{Requests: storage(asks)}}}
	c.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("1Gi")}
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: corev1.PersistentVolumeSpec{
		Capacity: storage("1Gi"), ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "c"}}}
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver}
	return c, v
}

var now = time.Unix(1, 0)

func own(v *corev1.PersistentVolume) bool {
	return v.Spec.CSI != nil && v.Spec.CSI.Driver == local.DriverName
}

// grow performs steps until there is none, and returns the states of the claim. byNodes means that
// nodes must expand too.
func grow(t *testing.T, c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, byNodes bool) (steps []string) {
	for range 10 {
		s := PlanExpansion(c, v, own(v), now)
		word := "volume "
		switch {
		case s.Grow:
			v.Spec.Capacity = storage(c.Spec.Resources.Requests.Storage().String())
			s = Grown(c, v, byNodes, now)
		case s.OnNodes:
			word = "nodes "
			s = settledStep(c, v.Spec.Capacity)
		case s.Status == nil:
			return steps
		default:
			word = ""
		}
		c.Status = *s.Status
		steps = append(steps, word+string(c.Status.AllocatedResourceStatuses[corev1.ResourceStorage])+" "+s.Reason)
	}
	t.Fatal("it does not come to rest")
	return nil
}

func TestOwnVolumesGrow(t *testing.T) {
	c, v := bound("3Gi", local.DriverName)
	want := []string{"ControllerResizeInProgress Resizing", "volume  VolumeResizeSuccessful"}
	if steps := grow(t, c, v, false); !equality.Semantic.DeepEqual(steps, want) {
		t.Errorf("steps %q", steps)
	}
	wanted := corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("3Gi"),
		AllocatedResources: storage("3Gi")}
	if !equality.Semantic.DeepEqual(c.Status, wanted) {
		t.Errorf("%+v", c.Status)
	}
	// The claim's status shows the progress, and another request changes it.
	c, v = bound("3Gi", local.DriverName)
	c.Status = *PlanExpansion(c, v, own(v), now).Status
	if n := len(c.Status.Conditions); n != 1 || c.Status.Conditions[0].Type != corev1.PersistentVolumeClaimResizing {
		t.Errorf("conditions %+v", c.Status.Conditions)
	}
	c.Spec.Resources.Requests = storage("5Gi")
	grow(t, c, v, false)
	if !equality.Semantic.DeepEqual(c.Status.Capacity, storage("5Gi")) || len(c.Status.Conditions) != 0 {
		t.Errorf("%+v", c.Status)
	}
	// Or it is taken back before the volume has grown.
	c, v = bound("3Gi", local.DriverName)
	c.Status = *PlanExpansion(c, v, own(v), now).Status
	c.Spec.Resources.Requests = storage("1Gi")
	grow(t, c, v, false)
	wanted = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("1Gi"),
		AllocatedResources: storage("1Gi")}
	if !equality.Semantic.DeepEqual(c.Status, wanted) {
		t.Errorf("%+v", c.Status)
	}
}

// Volumes of other drivers or without a claim are left alone, and an event names the responsible
// controller.
func TestOthersAreLeftAlone(t *testing.T) {
	for name, change := range map[string]func(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume){
		"nothing to grow": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Spec.Resources.Requests = storage("1Gi")
		},
		"not bound": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Status.Phase = corev1.ClaimLost
		},
		"being deleted": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.DeletionTimestamp = &metav1.Time{}
		},
		"another one's volume": func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) {
			v.Spec.ClaimRef.UID = "other"
		},
		"another volume": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Spec.VolumeName = "w"
		},
	} {
		for _, driver := range []string{local.DriverName, "other"} {
			c, v := bound("3Gi", driver)
			change(c, v)
			if s := PlanExpansion(c, v, own(v), now); s != (Step{}) {
				t.Errorf("%s: %+v", name, s)
			}
		}
	}
	c, v := bound("3Gi", "other.example.com")
	want := Step{Reason: "ExternalExpanding",
		Message: "waiting for an external controller to expand volume v to 3Gi: that of CSI driver other.example.com"}
	if s := PlanExpansion(c, v, own(v), now); s != want {
		t.Errorf("%+v", s)
	}
	v.Spec.CSI, v.Spec.HostPath = nil, &corev1.HostPathVolumeSource{}
	want.Message = "waiting for an external controller to expand volume v to 3Gi: this cluster cannot expand " +
		"volumes of its kind"
	if s := PlanExpansion(c, v, own(v), now); s != want {
		t.Errorf("%+v", s)
	}
	v.Spec.Capacity = storage("3Gi")
	if s := PlanExpansion(c, v, own(v), now); s != (Step{}) {
		t.Errorf("%+v", s)
	}
	if s := PlanExpansion(c, nil, false, now); s != (Step{}) {
		t.Errorf("%+v", s)
	}
}

// Nodes expand the volume regardless of which controller expanded it, and the claim's status shows
// that.
func TestNodesFollow(t *testing.T) {
	c, v := bound("3Gi", local.DriverName)
	want := []string{"ControllerResizeInProgress Resizing", "volume NodeResizePending FileSystemResizeRequired",
		"nodes  "}
	if steps := grow(t, c, v, true); !equality.Semantic.DeepEqual(steps, want) {
		t.Errorf("steps %q", steps)
	}
	if !equality.Semantic.DeepEqual(c.Status,
		corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("3Gi"),
			AllocatedResources: storage("3Gi")}) {
		t.Errorf("%+v", c.Status)
	}
	// The resizer of another driver has expanded it, with the status of current and of older
	// resizers.
	for _, mark := range []func(*corev1.PersistentVolumeClaimStatus){
		func(s *corev1.PersistentVolumeClaimStatus) {
			setResourceStatus(s, corev1.PersistentVolumeClaimNodeResizePending)
		},
		func(s *corev1.PersistentVolumeClaimStatus) {
			setTrueCondition(s, corev1.PersistentVolumeClaimFileSystemResizePending, "", now)
		},
	} {
		c, v = bound("3Gi", "other.example.com")
		v.Spec.Capacity = storage("3Gi")
		mark(&c.Status)
		if s := PlanExpansion(c, v, false, now); s != (Step{OnNodes: true}) {
			t.Errorf("%+v: %+v", c.Status, s)
		}
	}
	// A larger size is requested before the nodes have finished: the volume is expanded first, then
	// on the nodes.
	c, v = bound("3Gi", local.DriverName)
	v.Spec.Capacity = storage("3Gi")
	c.Status = *Grown(c, v, true, now).Status
	c.Spec.Resources.Requests = storage("4Gi")
	if s := PlanExpansion(c, v, true, now); s.Status == nil ||
		s.Status.AllocatedResourceStatuses[corev1.ResourceStorage] !=
			corev1.PersistentVolumeClaimControllerResizeInProgress {
		t.Errorf("%+v", s)
	}
}

// A claim with an infeasible request gets an event, and the size that it requests instead
// (RecoverVolumeExpansionFailure).
func TestInfeasible(t *testing.T) {
	c, v := bound("900Ti", local.DriverName)
	c.Status = *PlanExpansion(c, v, true, now).Status
	c.Status = *Failed(c, false, true, "too much", now).Status
	if st := c.Status.AllocatedResourceStatuses[corev1.ResourceStorage]; st !=
		corev1.PersistentVolumeClaimControllerResizeInfeasible || len(c.Status.Conditions) != 2 ||
		c.Status.Conditions[1].Type != corev1.PersistentVolumeClaimControllerResizeError ||
		c.Status.Conditions[1].Message != "too much" {
		t.Errorf("%+v", c.Status)
	}
	if s := Failed(c, false, true, "too much", now.Add(time.Hour)); s != (Step{}) {
		t.Errorf("told again: %+v", s)
	}
	if s := PlanExpansion(c, v, true, now); s != (Step{Grow: true}) {
		t.Errorf("it is not tried again: %+v", s)
	}
	c.Spec.Resources.Requests = storage("2Gi")
	grow(t, c, v, false)
	if !equality.Semantic.DeepEqual(c.Status,
		corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("2Gi"),
			AllocatedResources: storage("2Gi")}) {
		t.Errorf("%+v", c.Status)
	}
	// On a node the failure is final: only another size starts again.
	c, v = bound("3Gi", local.DriverName)
	v.Spec.Capacity = storage("3Gi")
	c.Status = *Grown(c, v, true, now).Status
	c.Status = *Failed(c, true, true, "never", now).Status
	if len(c.Status.Conditions) != 2 || c.Status.Conditions[1].Type != corev1.PersistentVolumeClaimNodeResizeError {
		t.Errorf("%+v", c.Status.Conditions)
	}
	if s := PlanExpansion(c, v, true, now); s != (Step{}) {
		t.Errorf("%+v", s)
	}
	c.Spec.Resources.Requests = storage("4Gi")
	if s := PlanExpansion(c, v, true, now); s.Status == nil {
		t.Errorf("%+v", s)
	}
}
