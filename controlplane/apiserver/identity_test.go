package apiserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// A name of the cluster's own parts gives nothing by itself: neither borrowed by impersonation, nor in a
// certificate, nor in a review. Only the group of administrators does, and that has to be granted.
func TestNamesOfOwnPartsGiveNothing(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	admin := r.admin()
	_, err := admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "helpdesk"}, Rules: []rbacv1.PolicyRule{
		{Verbs: []string{"impersonate"}, APIGroups: []string{""}, Resources: []string{"users"}},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "helpdesk"}, Subjects: []rbacv1.Subject{userSubject("mallory")},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "helpdesk"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	as := func(groups ...string) kubernetes.Interface {
		conf := r.config("mallory")
		conf.Impersonate.UserName, conf.Impersonate.Groups = api.UserAPIServer, groups
		c, err := kubernetes.NewForConfig(conf)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	eventually(t, func() error { // the binding takes an instant to have effect
		me, err := as().AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if err == nil && me.Status.UserInfo.Username != api.UserAPIServer {
			err = fmt.Errorf("acts as %+v", me.Status.UserInfo)
		}
		return err
	})
	for who, c := range map[string]kubernetes.Interface{"impersonated": as(), "certificate": r.client(api.UserAPIServer)} {
		if _, err := c.CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: listing secrets: %v", who, err)
		}
	}
	if _, err := as(api.GroupMasters).CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `cannot impersonate resource "groups"`) {
		t.Errorf("with a group not granted: %v", err)
	}
	review, err := admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: api.UserAPIServer, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "list", Resource: "secrets"},
	}}, metav1.CreateOptions{})
	if err != nil || review.Status.Allowed {
		t.Errorf("a review says %+v, %v", review.Status, err)
	}
}

// What an agent may ask tokens for: the audiences that the pod's volumes name, for a day at most.
func TestNodeTokens(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	r.must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	no := false
	// What a driver may ask tokens for cannot be set through the API; an object of before can say so all the same.
	driver := r.must(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "csi.example"}, Spec: storagev1.CSIDriverSpec{AttachRequired: &no}})
	before := driver.(*storagev1.CSIDriver).DeepCopy()
	before.Spec.TokenRequests = []storagev1.TokenRequest{{Audience: "for-the-driver"}}
	before.SetGroupVersionKind(storagev1.SchemeGroupVersion.WithKind("CSIDriver"))
	raw, err := r.registry.Encoded(before, runtime.ContentTypeProtobuf)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/registry/csidrivers/csi.example", raw)}}); err != nil {
		t.Fatal(err)
	}
	bound := func(name string, volumes ...corev1.VolumeSource) *corev1.Pod {
		p := newPod(name)
		p.Spec.AutomountServiceAccountToken = &no
		for i, v := range volumes {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: fmt.Sprint("v", i), VolumeSource: v})
		}
		p.Spec.NodeName = "a"
		return r.must(p).(*corev1.Pod)
	}
	projected := func(audience string) corev1.VolumeSource {
		return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: audience, Path: "token"}},
		}}}
	}
	r.must(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{corev1.ResourceStorage: quantity("1Gi")}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.example", VolumeHandle: "h"}},
	}})
	r.must(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim"}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: "pv",
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: quantity("1Gi")}},
	}})
	none := bound("none")
	vault := bound("vault", projected("vault"), projected(""))
	stored := bound("stored", corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}})
	agent := r.client(api.NodeUserPrefix+"a", api.GroupNodes)
	ask := func(p *corev1.Pod, seconds int64, audiences ...string) (*authenticationv1.TokenRequest, error) {
		return agent.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			Audiences: audiences, ExpirationSeconds: &seconds,
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID},
		}}, metav1.CreateOptions{})
	}
	for _, c := range []struct {
		pod       *corev1.Pod
		audiences []string
		refusal   string // "" = allowed
	}{
		{vault, []string{"vault"}, ""},
		{vault, nil, ""},
		{vault, []string{"bank"}, `audience "bank" not found in pod spec volume`},
		{vault, []string{"vault", "bank"}, "node may only request 0 or 1 audiences"},
		{none, nil, `audience "" not found in pod spec volume`},
		{stored, []string{"for-the-driver"}, ""},
		{stored, []string{"vault"}, `audience "vault" not found`},
	} {
		_, err := ask(c.pod, 3600, c.audiences...)
		if c.refusal == "" && err != nil || c.refusal != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.refusal)) {
			t.Errorf("pod %s, audiences %q: %v", c.pod.Name, c.audiences, err)
		}
	}
	got, err := ask(vault, 30*24*3600, "vault")
	if err != nil {
		t.Fatal(err)
	}
	if *got.Spec.ExpirationSeconds != 24*3600 || time.Until(got.Status.ExpirationTimestamp.Time) > 24*time.Hour {
		t.Errorf("a token of %d s until %s", *got.Spec.ExpirationSeconds, got.Status.ExpirationTimestamp)
	}
}

// A node reads nothing through mirror pods: neither by making one nor by turning a pod into one, and not through one that is stored.
func TestMirrorPodsGrantNothing(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	r.must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	r.must(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "crown"}, Data: map[string][]byte{"jewels": []byte("x")}})
	agent := r.client(api.NodeUserPrefix+"a", api.GroupNodes)
	secret := &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "crown"}, Key: "jewels"}
	mirror := newPod("mirror")
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	mirror.Spec.NodeName = "a"
	greedy := mirror.DeepCopy()
	greedy.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "E", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: secret}}}
	_, err := agent.CoreV1().Pods("default").Create(ctx, greedy, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `spec.containers["c"].env[].valueFrom.secretKeyRef.name leads to secrets`) {
		t.Errorf("a mirror pod with a secret: %v", err)
	}
	if _, err := agent.CoreV1().Pods("default").Create(ctx, mirror, metav1.CreateOptions{}); err != nil {
		t.Errorf("an honest mirror pod: %v", err)
	}
	pod := podOn(r, "pod", "a")
	for what, c := range map[string]struct{ name, patch, words string }{
		"adding":   {pod.Name, `{"metadata":{"annotations":{"kubernetes.io/config.mirror":"x"}}}`, "may not add mirror pod annotation"},
		"removing": {"mirror", `{"metadata":{"annotations":{"kubernetes.io/config.mirror":null}}}`, "may not remove or update mirror pod annotation"},
	} {
		_, err := agent.CoreV1().Pods("default").Patch(ctx, c.name, types.MergePatchType, []byte(c.patch), metav1.PatchOptions{}, "status")
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s the annotation: %v", what, err)
		}
		if _, err := r.admin().CoreV1().Pods("default").Patch(ctx, c.name, types.MergePatchType, []byte(c.patch), metav1.PatchOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("%s the annotation as an administrator: %v", what, err)
		}
	}
	owned := []byte(`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"c","uid":"u"}]}}`)
	if p, err := agent.CoreV1().Pods("default").Patch(ctx, pod.Name, types.MergePatchType, owned, metav1.PatchOptions{}, "status"); err != nil || len(p.OwnerReferences) != 0 {
		t.Errorf("an owner by way of a status report: %v, %v", err, p.OwnerReferences)
	}
}
