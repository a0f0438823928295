package apiservertest

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedappsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/await"
)

// UserSubject returns the RBAC subject for a user, as RoleBindings contain it.
func UserSubject(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}
}

// RoleBinding returns a RoleBinding of a Role or ClusterRole (roleKind) to the subjects.
func RoleBinding(namespace, name, roleKind, role string, who ...rbacv1.Subject) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: roleKind, Name: role}, Subjects: who,
	}
}

// ReplaceServiceAddress deletes Service default/kubernetes and creates it with the cluster IP ip.
func ReplaceServiceAddress(t *testing.T, r *Replica, ip string) error {
	t.Helper()
	services := r.Admin().CoreV1().Services("default")
	if err := services.Delete(Within(t), bootstrap.KubernetesServiceName, metav1.DeleteOptions{}); err != nil {
		return err
	}
	_, err := services.Create(Within(t),
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: bootstrap.KubernetesServiceName},
			Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Name: "https", Port: 443,
				Protocol: corev1.ProtocolTCP}}}}, metav1.CreateOptions{})
	return err
}

// StoreUnvalidated stores a Deployment without validation, as if an earlier release had accepted
// it. It returns a client for the Deployments of namespace default.
func StoreUnvalidated(
	ctx context.Context, r *Replica, d *appsv1.Deployment,
) typedappsv1.DeploymentInterface {
	r.TB.Helper()
	kind := r.Kinds.ByType(d)
	kind.Writes.Default(d)
	q := &api.Request{User: api.APIServerUser(), Verb: api.VerbCreate, Kind: kind, Namespace: "default", Object: d}
	if _, err := r.Registry.Create(ctx, q, registry.Stages{}); err != nil {
		r.TB.Fatal(err)
	}
	return r.Admin().AppsV1().Deployments("default")
}

// Condition returns the condition of a pod that has the given type; nil if the pod has none.
func Condition(p *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == kind {
			return &p.Status.Conditions[i]
		}
	}
	return nil
}

// Within returns a context that ends with the test, after a minute at the latest.
func Within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// NewPod returns a pod with one container.
func NewPod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c", Image: "nginx"}},
	}}
}

// StatusIn decodes the Status object in a response. It fails the test if the response contains no
// Status.
func StatusIn(t *testing.T, a Response) metav1.Status {
	t.Helper()
	var s metav1.Status
	if err := json.Unmarshal([]byte(a.Body), &s); err != nil || s.Kind != "Status" {
		t.Fatalf("code %d and no Status: %v\n%s", a.Code, err, a.Body)
	}
	return s
}

// Refused fails the test unless the response is a Status with the code and a message that contains
// words.
func Refused(t *testing.T, a Response, code int, words string) {
	t.Helper()
	s := StatusIn(t, a)
	if a.Code != code || int(s.Code) != code || s.Status != metav1.StatusFailure ||
		!strings.Contains(s.Message, words) {
		t.Errorf("got %d (%d %s): %q\nwant %d with %q", a.Code, s.Code, s.Reason, s.Message, code, words)
	}
}

// GrantEdit grants a user the role edit in namespace default, and waits until it is effective.
func GrantEdit(t testing.TB, r *Replica, user string) {
	t.Helper()
	c := r.Admin()
	_, err := c.RbacV1().RoleBindings("default").Create(Within(t),
		RoleBinding("default", user+"-edits", "ClusterRole", "edit", UserSubject(user)), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	Eventually(t, func() error {
		if d, _ := r.Server.Authorizer().Authorize(Within(t),
			&authz.Attributes{User: api.User{Name: user}, Verb: "create", APIVersion: "v1", Resource: "pods",
				Namespace: "default"}); d != authz.Allow {
			return fmt.Errorf("%s may not create pods yet", user)
		}
		return nil
	})
}

// Eventually waits until cond returns nil.
func Eventually(t testing.TB, cond func() error) {
	t.Helper()
	await.Until(context.Background(), t, await.Patience, 2*time.Millisecond, "the API", cond)
}

// Deployment returns a Deployment with one container.
func Deployment(name string, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: NewPod("").Spec},
		}}
}

// Quantity parses a quantity and panics if it is invalid.
func Quantity(s string) resource.Quantity { return resource.MustParse(s) }

// CreatePodOn creates a pod that is bound to a node, and a Secret that only this pod uses.
func (r *Replica) CreatePodOn(name, node string) *corev1.Pod {
	r.TB.Helper()
	r.Must(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name + "-secret"}})
	p := NewPod(name)
	p.Spec.Volumes = []corev1.Volume{{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
		SecretName: name + "-secret",
	}}}}
	made := r.Must(p).(*corev1.Pod)
	err := r.Admin().CoreV1().Pods("default").Bind(Within(r.TB), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Target: corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err != nil {
		r.TB.Fatal(err)
	}
	return made
}
