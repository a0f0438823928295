package noderestriction

import (
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// An agent gets tokens for the audiences of the CSI drivers of its pods' volumes, for every kind of
// volume. The pods must be its own and not mirror pods.
func TestTokensForDrivers(t *testing.T) {
	pod := func(name, node string, v corev1.VolumeSource) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(name)},
			Spec: corev1.PodSpec{
				NodeName: node, ServiceAccountName: "robot", Volumes: []corev1.Volume{{Name: "v", VolumeSource: v}},
			}}
	}
	inline := corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "csi.example"}}
	mirror := pod("mirror", "a", inline)
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	claim := func(name string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name},
			Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}}
	}
	cluster := admissiontest.World{
		"pods": {
			pod("inline", "a", inline), pod("other", "b", inline), mirror,
			pod("claims", "a",
				corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
					ClaimName: "claim"}}),
			pod("ephemeral", "a", corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}),
			pod("plain", "a", corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}),
		},
		"persistentvolumeclaims": {claim("claim"), claim("ephemeral-v")},
		"persistentvolumes": {&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"},
			Spec: corev1.PersistentVolumeSpec{
				PersistentVolumeSource: corev1.PersistentVolumeSource{
					CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.example"}},
			}}},
		"csidrivers": {&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "csi.example"},
			Spec: storagev1.CSIDriverSpec{
				TokenRequests: []storagev1.TokenRequest{{Audience: "vault"}},
			}}},
	}
	for name, want := range map[string]bool{"inline": true, "claims": true, "ephemeral": true, "plain": false,
		"other": false, "mirror": false} {
		ask := func(audience string, uid types.UID) error {
			return restrictToken(t.Context(), cluster, &admission.Attempt{
				Kind: podsKind(), Namespace: "n", Name: "robot", Request: &api.Request{Kind: podsKind(), Name: "robot"},
				Object: &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
					Audiences: []string{audience},
					BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod",
						Name: name, UID: uid},
				}},
			}, "a")
		}
		if err := ask("vault", types.UID(name)); (err == nil) != want {
			t.Errorf("for the driver of pod %s: %v", name, err)
		}
		if err := ask("bank", types.UID(name)); !apierrors.IsForbidden(err) {
			t.Errorf("for somebody else, pod %s: %v", name, err)
		}
		if err := ask("vault", "of another life"); !apierrors.IsForbidden(err) {
			t.Errorf("for an old pod %s: %v", name, err)
		}
	}
}
