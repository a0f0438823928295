package attack

import (
	"context"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

// Cost: three ConfigMaps that own each other, deleted in the foreground in a namespace that is deleted too.
// The namespace goes all the same.
func TestCircleOfOwners(t *testing.T) {
	cs, ctx := guardCluster(t), context.Background()
	ns := testenv.Namespace(t)
	maps := cs.CoreV1().ConfigMaps(ns)
	var ring []*v1.ConfigMap
	for i := range 3 {
		m, err := maps.Create(ctx, &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("m", i)}},
			metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ring = append(ring, m)
	}
	yes := true
	for i, m := range ring {
		next := ring[(i+1)%len(ring)]
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: next.Name,
			UID: next.UID, BlockOwnerDeletion: &yes}}
		if _, err := maps.Update(ctx, m, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	foreground := metav1.DeletePropagationForeground
	if err := maps.Delete(ctx, "m0", metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil {
		t.Fatal(err)
	}
	if err := cs.CoreV1().Namespaces().Delete(ctx, ns, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		_, err := cs.CoreV1().Namespaces().Get(ctx, ns, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("namespace %s is still there: %v", ns, err)
	})
}

// unschedulableReplicaSet returns a ReplicaSet with pods that fit no node.
func unschedulableReplicaSet(replicas int32) *appsv1.ReplicaSet {
	l := map[string]string{"app": "many"}
	return &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: "many"}, Spec: appsv1.ReplicaSetSpec{
		Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: l},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l}, Spec: v1.PodSpec{
			NodeSelector: map[string]string{"no": "where"},
			Containers:   []v1.Container{{Name: "c", Image: "keelson.dev/hello:v1"}}}},
	}}
}

// countPods returns the number of pods in a namespace.
func countPods(cs kubernetes.Interface, ns string) (int, error) {
	l, err := cs.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return 0, err
	}
	return len(l.Items), nil
}

// Cost: one object that asks for a million pods. Taken back, it is forgotten within seconds.
func TestMillionReplicas(t *testing.T) {
	cs, ctx := guardCluster(t), context.Background()
	ns := testenv.Namespace(t)
	if _, err := cs.AppsV1().ReplicaSets(ns).Create(ctx, unschedulableReplicaSet(1_000_000),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if n, err := countPods(cs, ns); err != nil || n < 500 {
			return fmt.Errorf("%d pods, %v", n, err)
		}
		return nil
	})
	one := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "many", Namespace: ns},
		Spec: autoscalingv1.ScaleSpec{Replicas: 1}}
	testenv.Eventually(t, soon, func() error {
		_, err := cs.AppsV1().ReplicaSets(ns).UpdateScale(ctx, "many", one, metav1.UpdateOptions{})
		return err
	})
	began, most := time.Now(), 0
	testenv.Eventually(t, 2*soon, func() error {
		n, err := countPods(cs, ns)
		if most = max(most, n); err != nil || n != 1 {
			return fmt.Errorf("%d pods, %v", n, err)
		}
		return nil
	})
	t.Logf("from %d pods to one in %s", most, time.Since(began).Round(10*time.Millisecond))
}

// Cost: the right to delete and create Services. The API's own Service is recreated at its address,
// which no other Service gets, and the leader's other work continues meanwhile.
func TestServiceOfTheAPI(t *testing.T) {
	cs, ctx := guardCluster(t), context.Background()
	ns := testenv.Namespace(t)
	had, err := cs.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	thief := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "thief"}, Spec: v1.ServiceSpec{
		ClusterIP: had.Spec.ClusterIP, Ports: []v1.ServicePort{{Port: 443}}}}
	for range 5 {
		if err := cs.CoreV1().Services("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{}); err != nil &&
			!apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		if _, err := cs.CoreV1().Services(ns).Create(ctx, thief, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("another Service with the address of the API: %v", err)
		}
		testenv.Eventually(t, soon, func() error {
			now, err := cs.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
			if err == nil && now.Spec.ClusterIP != had.Spec.ClusterIP {
				t.Fatalf("it was recreated at %s, want %s", now.Spec.ClusterIP, had.Spec.ClusterIP)
			}
			return err
		})
	}
	if _, err := cs.AppsV1().ReplicaSets(ns).Create(ctx, unschedulableReplicaSet(3), metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if n, err := countPods(cs, ns); err != nil || n != 3 {
			return fmt.Errorf("%d pods, %v", n, err)
		}
		return nil
	})
}
