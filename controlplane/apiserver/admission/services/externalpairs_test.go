package services_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/client"
)

// newServiceWithPairs returns a Service of 4,000 pairs of an external address and a port.
func newServiceWithPairs(name string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	for i := range 16 {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprint("203.0.113.", i+1))
	}
	for i := range int32(250) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: 20000 + i})
	}
	return s
}

// F117: the limit of a namespace holds for Services that are created and changed concurrently
// through several replicas. Four Services of 4,000 pairs fit into 16,384.
func TestConcurrentServicesKeepExternalPairLimit(t *testing.T) {
	_, clients := apiservertest.StartPipelines(t)
	ctx := t.Context()
	for i := range 3 { // these gain their pairs by an update
		s := newServiceWithPairs(fmt.Sprint("s", i))
		s.Spec.ExternalIPs = nil
		if err := apiservertest.TryCreate(clients[0], s, false); err != nil {
			t.Fatal(err)
		}
	}
	var writers sync.WaitGroup
	var mu sync.Mutex
	accepted := 0
	for i := range 9 {
		writers.Go(func() {
			name, c := fmt.Sprint("s", i), clients[i%len(clients)]
			err := apiservertest.TryCreate(c, newServiceWithPairs(name), false)
			for apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
				var stored *corev1.Service
				if stored, err = client.Get[*corev1.Service](ctx, c, "default", name); err == nil {
					stored = stored.DeepCopy()
					stored.Spec.ExternalIPs = newServiceWithPairs(name).Spec.ExternalIPs
					_, err = client.Update(ctx, c, stored)
				}
			}
			switch {
			case err == nil:
				mu.Lock()
				accepted++
				mu.Unlock()
			case !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "the maximum per namespace is 16384"):
				t.Errorf("Service %s: %v, want 422 of the namespace's bound", name, err)
			}
		})
	}
	writers.Wait()
	if accepted != 4 {
		t.Errorf("%d Services of 4,000 pairs each are in the namespace, want 4", accepted)
	}
	if err := apiservertest.TryCreate(clients[1], newServiceWithPairs("dry"), true); !apierrors.IsInvalid(err) {
		t.Errorf("a dry run beyond the bound: %v, want 422", err)
	}
	// A deletion makes room at once, through any replica.
	var gone string
	list, err := clients[2].ListKind(ctx, clients[2].Kinds().ByType(&corev1.Service{}), "default")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range list {
		if s := o.(*corev1.Service); len(s.Spec.ExternalIPs) > 0 {
			gone = s.Name
		}
	}
	if err := client.Delete[*corev1.Service](ctx, clients[2], "default", gone, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := apiservertest.TryCreate(clients[1], newServiceWithPairs("late"), false); err != nil {
		t.Errorf("after a Service was deleted through another replica: %v", err)
	}
}
