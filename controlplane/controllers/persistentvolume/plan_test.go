package persistentvolume

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/storage/volume"
)

func pv(name, size string, change ...func(v *corev1.PersistentVolume)) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)},
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: "disk",
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
	}, Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable}}
	for _, c := range change {
		c(v)
	}
	return v
}

func pvc(change ...func(c *corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	class := "disk"
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data", UID: "c"},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Gi")}},
		}}
	for _, f := range change {
		f(c)
	}
	return c
}

func claimedBy(name, uid string) func(v *corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "ns", Name: name, UID: types.UID(uid)}
	}
}

var planClaimWait, planClaimNow = storagev1.VolumeBindingWaitForFirstConsumer, storagev1.VolumeBindingImmediate

func planClaimClass(
	name, provisioner string, mode storagev1.VolumeBindingMode, isDefault bool,
) *storagev1.StorageClass {
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner,
		VolumeBindingMode: &mode}
	if isDefault {
		c.Annotations = map[string]string{defaultClassAnnotation: "true"}
	}
	return c
}

var planClaimDisk, planClaimLate, planClaimMade = planClaimClass("disk", volume.NotSupportedProvisioner,
	planClaimNow, true),
	planClaimClass("disk", volume.NotSupportedProvisioner, planClaimWait, false),
	planClaimClass("disk", "csi.example.com", planClaimNow, false)

func planClaimNoClass(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil }

func planClaimWants(name string) func(c *corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = name }
}

func planClaimBound(c *corev1.PersistentVolumeClaim) {
	c.Annotations = map[string]string{volume.AnnBindCompleted: "yes"}
}

func planClaimSelected(c *corev1.PersistentVolumeClaim) {
	c.Annotations = map[string]string{volume.AnnSelectedNode: "w1"}
}

func planClaimMode(m corev1.PersistentVolumeAccessMode) func(v *corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) { v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{m} }
}

func planClaimLabelled(v *corev1.PersistentVolume) { v.Labels = map[string]string{"speed": "fast"} }

// planClaimCases are the cases of TestPlanClaim.
var planClaimCases = []struct {
	name    string
	claim   *corev1.PersistentVolumeClaim
	volumes []*corev1.PersistentVolume
	class   *storagev1.StorageClass
	want    string // "bind NAME", "class NAME", or "PHASE Reason"
}{
	{"the smallest that fits", pvc(), []*corev1.PersistentVolume{pv("huge", "9Gi"), pv("small", "1Gi"),
		pv("right", "3Gi")}, planClaimDisk, "bind right"},
	{"none large enough", pvc(), []*corev1.PersistentVolume{pv("small", "1Gi")}, planClaimDisk,
		"Pending FailedBinding"},
	{"wrong mode", pvc(), []*corev1.PersistentVolume{pv("ro", "3Gi", planClaimMode(corev1.ReadOnlyMany))},
		planClaimDisk,
		"Pending FailedBinding"},
	{"another class", pvc(), []*corev1.PersistentVolume{pv("x", "3Gi", func(v *corev1.PersistentVolume) {
		v.Spec.StorageClassName = "tape"
	})}, planClaimDisk, "Pending FailedBinding"},
	{"by label", pvc(func(c *corev1.PersistentVolumeClaim) {
		c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"speed": "fast"}}
	}), []*corev1.PersistentVolume{pv("slow", "2Gi"), pv("fast", "9Gi", planClaimLabelled)},
		planClaimDisk, "bind fast"},
	{"taken", pvc(), []*corev1.PersistentVolume{pv("x", "3Gi", claimedBy("other", "o"))}, planClaimDisk,
		"Pending FailedBinding"},
	{"released is not given away", pvc(),
		[]*corev1.PersistentVolume{pv("x", "3Gi", func(v *corev1.PersistentVolume) {
			v.Status.Phase = corev1.VolumeReleased
		})}, planClaimDisk, "Pending FailedBinding"},
	{"kept for this claim, also when larger", pvc(),
		[]*corev1.PersistentVolume{pv("right", "2Gi"), pv("kept", "9Gi", claimedBy("data", ""))},
		planClaimDisk, "bind kept"},
	{"half bound: finished after a crash", pvc(),
		[]*corev1.PersistentVolume{pv("right", "2Gi"), pv("half", "9Gi", claimedBy("data", "c"))},
		planClaimDisk, "bind half"},
	{"kept for a former claim of that name", pvc(),
		[]*corev1.PersistentVolume{pv("x", "9Gi", claimedBy("data", "former"))}, planClaimDisk,
		"Pending FailedBinding"},
	{"waits for a consumer", pvc(), []*corev1.PersistentVolume{pv("right", "2Gi")}, planClaimLate,
		"Pending WaitForFirstConsumer"},
	{"the scheduler has chosen the volume", pvc(),
		[]*corev1.PersistentVolume{pv("right", "2Gi", claimedBy("data", "c"))}, planClaimLate, "bind right"},
	{"the scheduler has chosen the node", pvc(planClaimSelected), []*corev1.PersistentVolume{pv("right", "2Gi")},
		planClaimLate, "bind right"},
	{"somebody provisions", pvc(), nil, planClaimMade, "Pending ExternalProvisioning by csi.example.com"},
	{"no such class", pvc(), nil, nil, "Pending ProvisioningFailed"},
	{"no class named: the default", pvc(planClaimNoClass), nil, planClaimDisk, "class disk"},
	{"no class at all", pvc(planClaimNoClass), nil, nil, "Pending FailedBinding"},
	{"by name", pvc(planClaimWants("huge")), []*corev1.PersistentVolume{pv("huge", "9Gi"), pv("right", "2Gi")},
		planClaimDisk, "bind huge"},
	{"by name, too small", pvc(planClaimWants("small")), []*corev1.PersistentVolume{pv("small", "1Gi")}, planClaimDisk,
		"Pending VolumeMismatch"},
	{"by name, absent", pvc(planClaimWants("x")), nil, planClaimDisk, "Pending FailedBinding"},
	{"by name, taken", pvc(planClaimWants("x")), []*corev1.PersistentVolume{pv("x", "9Gi", claimedBy("other", "o"))},
		planClaimDisk,
		"Pending FailedBinding"},
	{"bound: looked after", pvc(planClaimWants("x"), planClaimBound),
		[]*corev1.PersistentVolume{pv("x", "9Gi", claimedBy("data", "c"))}, planClaimDisk, "bind x"},
	{"bound and the volume is gone", pvc(planClaimWants("x"), planClaimBound), nil, planClaimDisk, "Lost ClaimLost"},
	{"bound to nothing", pvc(planClaimBound), nil, planClaimDisk, "Lost ClaimLost"},
	{"bound to another's", pvc(planClaimWants("x"), planClaimBound),
		[]*corev1.PersistentVolume{pv("x", "9Gi", claimedBy("other", "o"))}, planClaimDisk, "Lost ClaimMisbound"},
}

func TestPlanClaim(t *testing.T) {
	for _, c := range planClaimCases {
		t.Run(c.name, func(t *testing.T) {
			var classes []*storagev1.StorageClass
			if c.class != nil {
				classes = append(classes, c.class)
			}
			a := PlanClaim(c.claim, c.volumes, classes)
			got := string(a.Phase) + " " + a.Reason
			switch {
			case a.Bind != nil:
				got = "bind " + a.Bind.Name
			case a.Class != "":
				got = "class " + a.Class
			case a.Provisioner != "":
				got += " by " + a.Provisioner
			}
			if got != c.want {
				t.Errorf("got %q, want %q (%s)", got, c.want, a.Message)
			}
		})
	}
}

func TestPlanVolume(t *testing.T) {
	on := func(name string) *corev1.PersistentVolumeClaim {
		return pvc(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = name })
	}
	policy := func(p corev1.PersistentVolumeReclaimPolicy) func(v *corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) { v.Spec.PersistentVolumeReclaimPolicy = p }
	}
	dynamic := func(v *corev1.PersistentVolume) {
		v.Annotations = map[string]string{volume.AnnDynamicallyProvisioned: "csi.example.com"}
	}
	mine := claimedBy("data", "c")
	for _, c := range []struct {
		name  string
		pv    *corev1.PersistentVolume
		claim *corev1.PersistentVolumeClaim
		want  VolumeAction
	}{
		{"free", pv("x", "1Gi"), nil, VolumeAction{Phase: corev1.VolumeAvailable}},
		{"kept for a claim to come", pv("x", "1Gi", claimedBy("data", "")), nil,
			VolumeAction{Phase: corev1.VolumeAvailable, Claim: true}},
		{"bound", pv("x", "1Gi", mine), on("x"), VolumeAction{Phase: corev1.VolumeBound}},
		{"half bound", pv("x", "1Gi", mine), on(""), VolumeAction{Claim: true}},
		{"its claim is gone: kept", pv("x", "1Gi", mine), nil, VolumeAction{Phase: corev1.VolumeReleased}},
		{"its claim is gone: its provisioner deletes it",
			pv("x", "1Gi", mine, policy(corev1.PersistentVolumeReclaimDelete), dynamic), nil,
			VolumeAction{Phase: corev1.VolumeReleased}},
		{"its claim took another: let go", pv("x", "1Gi", mine), on("y"), VolumeAction{Unbind: true}},
		{"made for a claim that took another", pv("x", "1Gi", mine, policy(corev1.PersistentVolumeReclaimDelete),
			dynamic), on("y"), VolumeAction{Phase: corev1.VolumeReleased}},
	} {
		if got := PlanVolume(c.pv, c.claim); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	for _, p := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimDelete,
		corev1.PersistentVolumeReclaimRecycle} {
		if got := PlanVolume(pv("x", "1Gi", mine, policy(p)), nil); got.Phase != corev1.VolumeFailed ||
			got.Message == "" {
			t.Errorf("%s without a driver: %+v", p, got)
		}
	}
}

// Every write of a binding may be the last before a crash: the remaining writes are completed, and
// none is repeated.
func TestBindingIsResumed(t *testing.T) {
	v, c := pv("x", "9Gi"), pvc()
	next, changed, err := BoundVolume(v, c)
	if err != nil || !changed || next.Spec.ClaimRef.UID != "c" ||
		next.Annotations[volume.AnnBoundByController] != "yes" || v.Spec.ClaimRef != nil {
		t.Fatalf("%+v, %v, %v", next.Spec.ClaimRef, changed, err)
	}
	if _, changed, _ = BoundVolume(next, c); changed {
		t.Error("the volume is bound twice")
	}
	bound, changed := BoundClaim(c, next)
	if !changed || bound.Spec.VolumeName != "x" || bound.Annotations[volume.AnnBindCompleted] != "yes" ||
		c.Spec.VolumeName != "" {
		t.Fatalf("%+v, %v", bound, changed)
	}
	if _, changed = BoundClaim(bound, next); changed {
		t.Error("the claim is bound twice")
	}
	free := Unbound(next)
	if free.Spec.ClaimRef != nil || free.Annotations[volume.AnnBoundByController] != "" {
		t.Errorf("let go: %+v", free)
	}
	chosen := Unbound(pv("x", "9Gi", claimedBy("data", "c")))
	if chosen.Spec.ClaimRef == nil || chosen.Spec.ClaimRef.UID != "" || chosen.Spec.ClaimRef.Name != "data" {
		t.Errorf("what the user wrote is %+v", chosen.Spec.ClaimRef)
	}
}

// A volume that was provisioned for a claim is bound to it, even if the claim has named another
// attributes class since. Other volumes must have the claim's class.
func TestClaimsKeepWhatWasMadeForThem(t *testing.T) {
	attributes := func(class string) func(v *corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) { v.Spec.VolumeAttributesClassName = &class }
	}
	made := func(v *corev1.PersistentVolume) {
		v.Annotations = map[string]string{volume.AnnDynamicallyProvisioned: "csi.example.com"}
	}
	gold := "gold"
	named := func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = &gold }
	for name, one := range map[string]struct {
		claim *corev1.PersistentVolumeClaim
		v     *corev1.PersistentVolume
		binds bool
	}{
		"made for it": {pvc(named), pv("v", "2Gi", attributes("silver"), claimedBy("data", "c"), made),
			true},
		"made for one before it": {pvc(named), pv("v", "2Gi", attributes("silver"), claimedBy("data", "old"), made),
			false},
		"of its class":           {pvc(named), pv("v", "2Gi", attributes("gold")), true},
		"of another class":       {pvc(named), pv("v", "2Gi", attributes("silver")), false},
		"of none":                {pvc(named), pv("v", "2Gi"), false},
		"of one it does not ask": {pvc(), pv("v", "2Gi", attributes("silver")), false},
	} {
		if a := PlanClaim(one.claim, []*corev1.PersistentVolume{one.v}, nil); (a.Bind != nil) != one.binds {
			t.Errorf("%s: %+v", name, a)
		}
	}
}
