package server_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A namespace that is deleted while clients of three replicas create objects in it is removed, and
// no object outlives it, including objects that own each other.
func TestNamespaceDeletedUnderCreations(t *testing.T) {
	p := newPlane(t, 3, nil)
	ctx := context.Background()
	var clients []*kubernetes.Clientset
	for n := 1; n <= 3; n++ {
		clients = append(clients, p.Client(fmt.Sprintf("cp%d", n)))
	}
	for round := range 3 {
		ns := fmt.Sprintf("doomed-%d", round)
		if _, err := clients[0].CoreV1().Namespaces().Create(ctx,
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		var made, refused atomic.Int64
		var wg sync.WaitGroup
		begun := make(chan struct{})
		begin := sync.OnceFunc(func() { close(begun) })
		for worker := range 12 {
			cs := clients[worker%3]
			wg.Go(func() {
				// until creations have been refused for some time
				for i, more := 0, 20; i < 1000 && more > 0; i++ {
					switch err := createObject(ctx, cs, ns, fmt.Sprintf("o%d-%d", worker, i)); {
					case err == nil:
						if made.Add(1) == 200 {
							begin()
						}
					case isNamespaceGone(err):
						refused.Add(1)
						more--
					default:
						t.Errorf("creating in %s: %v", ns, err)
						more--
					}
				}
			})
		}
		go func() { wg.Wait(); begin() }()
		<-begun
		began := p.deleteNamespace(clients[round%3], ns)
		wg.Wait()
		t.Logf("round %d: %d creations succeeded, %d were refused; gone after %v", round, made.Load(),
			refused.Load(), began())
		if refused.Load() == 0 {
			t.Error("no creation was refused: the namespace was deleted too late")
		}
		if left := p.listObjects(ns); len(left) > 0 {
			t.Errorf("%d objects outlived their namespace: %v", len(left), left[:min(10, len(left))])
		}
	}
}

// createObject creates one object, or two objects that own each other.
func createObject(ctx context.Context, cs *kubernetes.Clientset, ns, name string) error {
	labels := map[string]string{"app": name}
	switch name[len(name)-1] {
	case '0':
		zero := int32(0)
		_, err := cs.AppsV1().Deployments(ns).Create(ctx,
			&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
				Replicas: &zero, Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
					Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "i"}}}}}},
			metav1.CreateOptions{})
		return err
	case '1':
		return createOwnerCycle(ctx, cs, ns, name)
	case '2', '3', '4':
		_, err := cs.CoreV1().Secrets(ns).Create(ctx, &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{})
		return err
	}
	_, err := cs.CoreV1().ConfigMaps(ns).Create(ctx, &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	return err
}

// createOwnerCycle creates a ConfigMap and a Secret that own and block each other.
func createOwnerCycle(ctx context.Context, cs *kubernetes.Clientset, ns, name string) error {
	m, err := cs.CoreV1().ConfigMaps(ns).Create(ctx, &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	if err != nil {
		return err
	}
	yes := true
	s, err := cs.CoreV1().Secrets(ns).Create(ctx,
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "ConfigMap", Name: name, UID: m.UID, BlockOwnerDeletion: &yes}}}},
		metav1.CreateOptions{})
	if err != nil {
		return err
	}
	m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Secret", Name: name, UID: s.UID,
		BlockOwnerDeletion: &yes}}
	m.ResourceVersion = ""
	_, err = cs.CoreV1().ConfigMaps(ns).Update(ctx, m, metav1.UpdateOptions{})
	return err
}

// isNamespaceGone reports whether an error means that the namespace is being deleted or is gone.
func isNamespaceGone(err error) bool {
	return apierrors.HasStatusCause(err, v1.NamespaceTerminatingCause) || apierrors.IsNotFound(err)
}

// deleteNamespace deletes a namespace; the returned function waits until it is gone.
func (p *plane) deleteNamespace(cs *kubernetes.Clientset, ns string) (gone func() string) {
	p.T.Helper()
	ctx, began := context.Background(), metav1.Now()
	if err := cs.CoreV1().Namespaces().Delete(ctx, ns, metav1.DeleteOptions{}); err != nil {
		p.T.Fatal(err)
	}
	return func() string {
		servertest.Eventually(p.T, func() error {
			got, err := cs.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return fmt.Errorf("namespace %s: %v %+v", ns, err, got.Status)
		})
		return metav1.Now().Sub(began.Time).String()
	}
}

// listObjects returns all objects of all kinds in a namespace, as each replica lists them.
func (p *plane) listObjects(ns string) (out []string) {
	p.T.Helper()
	for name := range p.Members {
		c, err := metadata.NewForConfig(p.RESTConfig(name))
		if err != nil {
			p.T.Fatal(err)
		}
		for _, k := range kinds.All().All() {
			if k.Serving.Virtual || !k.Namespaced {
				continue
			}
			list, err := c.Resource(k.GVK.GroupVersion().WithResource(k.Resource)).Namespace(ns).List(
				context.Background(), metav1.ListOptions{})
			if err != nil {
				p.T.Fatal(err)
			}
			for _, o := range list.Items {
				out = append(out, strings.Join([]string{name, k.Resource, o.Name}, " "))
			}
		}
	}
	return out
}
