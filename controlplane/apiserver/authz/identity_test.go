package authz_test

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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The user name of a component of the cluster grants nothing by itself, neither by impersonation,
// nor in a certificate, nor in a SubjectAccessReview. Only the administrators' group grants
// rights, and it must be granted.
func TestComponentNamesGrantNothing(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	admin := r.Admin()
	_, err := admin.RbacV1().ClusterRoles().Create(ctx,
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "helpdesk"}, Rules: []rbacv1.PolicyRule{
			{Verbs: []string{"impersonate"}, APIGroups: []string{""}, Resources: []string{"users"}},
		}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "helpdesk"},
		Subjects:   []rbacv1.Subject{apiservertest.UserSubject("mallory")},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "helpdesk"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	as := func(groups ...string) kubernetes.Interface {
		conf := r.ClientConfig("mallory")
		conf.Impersonate.UserName, conf.Impersonate.Groups = api.UserAPIServer, groups
		c, err := kubernetes.NewForConfig(conf)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	apiservertest.Eventually(t, func() error { // the binding takes an instant to have effect
		me, err := as().AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{},
			metav1.CreateOptions{})
		if err == nil && me.Status.UserInfo.Username != api.UserAPIServer {
			err = fmt.Errorf("acts as %+v", me.Status.UserInfo)
		}
		return err
	})
	for who, c := range map[string]kubernetes.Interface{"impersonated": as(),
		"certificate": r.Client(api.UserAPIServer)} {
		if _, err := c.CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: listing secrets: %v", who, err)
		}
	}
	if _, err := as(api.GroupMasters).CoreV1().Secrets("kube-system").List(ctx,
		metav1.ListOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `cannot impersonate resource "groups"`) {
		t.Errorf("with a group not granted: %v", err)
	}
	review, err := admin.AuthorizationV1().SubjectAccessReviews().Create(ctx,
		&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: api.UserAPIServer, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "list",
				Resource: "secrets"},
		}}, metav1.CreateOptions{})
	if err != nil || review.Status.Allowed {
		t.Errorf("a review says %+v, %v", review.Status, err)
	}
}

// An agent may request tokens for the audiences of the pod's volumes, for a day at most.
func TestNodeTokens(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	no := false
	r.Must(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "csi.example"}, Spec: storagev1.CSIDriverSpec{
		AttachRequired: &no, TokenRequests: []storagev1.TokenRequest{{Audience: "for-the-driver"}}}})
	bound := func(name string, volumes ...corev1.VolumeSource) *corev1.Pod {
		p := apiservertest.NewPod(name)
		p.Spec.AutomountServiceAccountToken = &no
		for i, v := range volumes {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: fmt.Sprint("v", i), VolumeSource: v})
		}
		p.Spec.NodeName = "a"
		return r.Must(p).(*corev1.Pod)
	}
	projected := func(audience string) corev1.VolumeSource {
		return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: audience, Path: "token"}},
		}}}
	}
	r.Must(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
		Capacity:    corev1.ResourceList{corev1.ResourceStorage: apiservertest.Quantity("1Gi")},
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.example", VolumeHandle: "h"}},
	}})
	r.Must(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: "pv",
			Resources: corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: apiservertest.Quantity("1Gi")}},
		}})
	none := bound("none")
	vault := bound("vault", projected("vault"), projected(""))
	stored := bound("stored",
		corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}})
	agent := r.Client(api.NodeUserPrefix+"a", api.GroupNodes)
	ask := func(p *corev1.Pod, seconds int64, audiences ...string) (*authenticationv1.TokenRequest, error) {
		return agent.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default",
			&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
				Audiences: audiences, ExpirationSeconds: &seconds,
				BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod",
					Name: p.Name, UID: p.UID},
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
		if c.refusal == "" && err != nil || c.refusal != "" &&
			(!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.refusal)) {
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

// A node cannot read other objects through mirror pods: not by creating one, not by changing a pod
// into one, and not through a stored one.
func TestMirrorPodsGrantNothing(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	r.Must(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "crown"},
		Data: map[string][]byte{"jewels": []byte("x")}})
	agent := r.Client(api.NodeUserPrefix+"a", api.GroupNodes)
	secret := &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "crown"}, Key: "jewels"}
	mirror := apiservertest.NewPod("mirror")
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	mirror.Spec.NodeName = "a"
	greedy := mirror.DeepCopy()
	greedy.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "E", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: secret}}}
	_, err := agent.CoreV1().Pods("default").Create(ctx, greedy, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `spec.containers["c"].env[].valueFrom.secretKeyRef.name refers to secrets`) {
		t.Errorf("a mirror pod with a secret: %v", err)
	}
	if _, err := agent.CoreV1().Pods("default").Create(ctx, mirror, metav1.CreateOptions{}); err != nil {
		t.Errorf("an honest mirror pod: %v", err)
	}
	pod := r.CreatePodOn("pod", "a")
	for what, c := range map[string]struct{ name, patch, words string }{
		"adding": {pod.Name, `{"metadata":{"annotations":{"kubernetes.io/config.mirror":"x"}}}`,
			"may not add mirror pod annotation"},
		"removing": {"mirror", `{"metadata":{"annotations":{"kubernetes.io/config.mirror":null}}}`,
			"may not remove or update mirror pod annotation"},
	} {
		_, err := agent.CoreV1().Pods("default").Patch(ctx, c.name, types.MergePatchType, []byte(c.patch),
			metav1.PatchOptions{}, "status")
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s the annotation: %v", what, err)
		}
		if _, err := r.Admin().CoreV1().Pods("default").Patch(ctx, c.name, types.MergePatchType, []byte(c.patch),
			metav1.PatchOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("%s the annotation as an administrator: %v", what, err)
		}
	}
	owned := []byte(`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"c","uid":"u"}]}}`)
	if p, err := agent.CoreV1().Pods("default").Patch(ctx, pod.Name, types.MergePatchType, owned, metav1.PatchOptions{},
		"status"); err != nil || len(p.OwnerReferences) != 0 {
		t.Errorf("an owner by way of a status report: %v, %v", err, p.OwnerReferences)
	}
}
