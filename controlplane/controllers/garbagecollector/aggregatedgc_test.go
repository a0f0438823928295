package garbagecollector_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// shelf is an aggregated API that stores the metadata of flunders, as a server built of Kubernetes' library does.
type shelf struct {
	mu      sync.Mutex
	down    bool
	last    int
	objects map[string]*metav1.PartialObjectMetadata // by path
}

func (s *shelf) set(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
}

func (s *shelf) put(name string, finalizers []string, owners ...metav1.OwnerReference) metav1.OwnerReference {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
		UID:             types.UID("u-" + name),
		ResourceVersion: strconv.Itoa(s.last), OwnerReferences: owners, Finalizers: finalizers}}
	s.objects[flunderPath+"/"+name] = o
	block := true
	return metav1.OwnerReference{APIVersion: "wardle.example.com/v1alpha1", Kind: "Flunder", Name: name, UID: o.UID,
		BlockOwnerDeletion: &block}
}

const flunderPath = "/apis/wardle.example.com/v1alpha1/namespaces/default/flunders"

func (s *shelf) get(name string) *metav1.PartialObjectMetadata {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.objects[flunderPath+"/"+name]; o != nil {
		return o.DeepCopy()
	}
	return nil
}

func (s *shelf) Discover(context.Context) ([]engine.AggregatedResource, map[schema.GroupVersion]error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if gv := testcluster.FlunderResource.GroupVersion(); s.down {
		return nil, map[schema.GroupVersion]error{gv: errors.New("stale")}
	}
	return []engine.AggregatedResource{{GroupVersionResource: testcluster.FlunderResource,
			APIResource: metav1.APIResource{
				Name: "flunders", Kind: "Flunder", Namespaced: true,
				Verbs: []string{"get", "list", "delete", "patch"}}}},
		nil
}

func (s *shelf) Call(_ context.Context, method, path string, _ url.Values, body []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		return nil, apierrors.NewServiceUnavailable("service unavailable")
	}
	if path == "/apis/wardle.example.com/v1alpha1/flunders" {
		var list metav1.PartialObjectMetadataList
		for _, o := range s.objects {
			list.Items = append(list.Items, *o)
		}
		return json.Marshal(list)
	}
	o := s.objects[path]
	if o == nil {
		return nil, apierrors.NewNotFound(testcluster.FlunderResource.GroupResource(), path)
	}
	switch method {
	case http.MethodGet:
		return json.Marshal(o)
	case http.MethodDelete:
		var options metav1.DeleteOptions
		if err := json.Unmarshal(body, &options); err != nil {
			return nil, err
		}
		if p := options.Preconditions; p == nil || *p.UID != o.UID || *p.ResourceVersion != o.ResourceVersion {
			return nil, fmt.Errorf("preconditions %v", p)
		}
		if options.PropagationPolicy != nil && *options.PropagationPolicy == metav1.DeletePropagationForeground {
			o.Finalizers = append(o.Finalizers, metav1.FinalizerDeleteDependents)
		}
		now := metav1.Now()
		o.DeletionTimestamp = &now
	case http.MethodPatch:
		var patch metav1.PartialObjectMetadata
		if err := json.Unmarshal(body, &patch); err != nil {
			return nil, err
		}
		if patch.UID != o.UID || patch.ResourceVersion != o.ResourceVersion {
			return nil, apierrors.NewConflict(testcluster.FlunderResource.GroupResource(), o.Name,
				errors.New("modified"))
		}
		if strings.Contains(string(body), `"finalizers"`) {
			o.Finalizers = patch.Finalizers
		}
		if strings.Contains(string(body), `"ownerReferences"`) {
			o.OwnerReferences = patch.OwnerReferences
		}
	}
	s.last++
	o.ResourceVersion = strconv.Itoa(s.last)
	if o.DeletionTimestamp != nil && len(o.Finalizers) == 0 {
		delete(s.objects, path)
	}
	return json.Marshal(o)
}

func onShelf(t *testing.T) (*testcluster.Cluster, *shelf) {
	s := &shelf{objects: map[string]*metav1.PartialObjectMetadata{}}
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, Aggregated: s,
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{garbagecollector.New(d)}
		}})
	w.Lead(engine.Options{})
	return w, s
}

func hasConfigMap(w *testcluster.Cluster, name string) bool {
	w.T.Helper()
	_, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", name)
	if err != nil && !apierrors.IsNotFound(err) {
		w.T.Fatal(err)
	}
	return err == nil
}

func deleteConfigMap(w *testcluster.Cluster, name string, policy metav1.DeletionPropagation) {
	w.T.Helper()
	if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", name,
		metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
		w.T.Fatal(err)
	}
}

// P28: dependents of an aggregated owner stay while its server does not answer, and go after the owner.
func TestDependentsOfAggregatedOwnersAreCollected(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		ref := s.put("owner", nil)
		configMap(w, "dependent", &ref)
		time.Sleep(10 * time.Minute) // virtual
		s.set(true)
		time.Sleep(10 * time.Minute) // virtual
		if !hasConfigMap(w, "dependent") {
			t.Fatal("the dependent of an owner that is not known was collected")
		}
		s.mu.Lock()
		delete(s.objects, flunderPath+"/owner")
		s.mu.Unlock()
		time.Sleep(10 * time.Minute) // virtual
		if !hasConfigMap(w, "dependent") {
			t.Fatal("the dependent was collected although the server of its owner does not answer")
		}
		s.set(false)
		time.Sleep(2 * time.Minute) // virtual
		if hasConfigMap(w, "dependent") {
			t.Error("the dependent of a deleted aggregated owner is still there")
		}
	})
}

// P28: an aggregated owner in foreground deletion is deleted after its dependents.
func TestAggregatedOwnersWaitForTheirDependents(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		ref := s.put("owner", []string{metav1.FinalizerDeleteDependents})
		configMap(w, "dependent", &ref)
		time.Sleep(time.Minute) // virtual
		s.mu.Lock()
		now := metav1.Now()
		s.objects[flunderPath+"/owner"].DeletionTimestamp = &now
		s.mu.Unlock()
		time.Sleep(10 * time.Minute) // virtual
		if hasConfigMap(w, "dependent") || s.get("owner") != nil {
			t.Errorf("the dependent is there: %v, the owner: %v", hasConfigMap(w, "dependent"), s.get("owner"))
		}
	})
}

// P28: aggregated dependents of a local owner are collected, waited for and orphaned.
func TestAggregatedDependentsAreCollected(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		hold := []string{"example.com/hold"}
		for _, name := range []string{"background", "foreground", "orphan"} {
			ref := ofConfigMap(configMap(w, name, nil))
			block := true
			ref.BlockOwnerDeletion = &block
			s.put("of-"+name, hold, *ref)
		}
		time.Sleep(time.Minute) // virtual
		deleteConfigMap(w, "background", metav1.DeletePropagationBackground)
		deleteConfigMap(w, "foreground", metav1.DeletePropagationForeground)
		s.set(true)
		deleteConfigMap(w, "orphan", metav1.DeletePropagationOrphan)
		time.Sleep(5 * time.Minute) // virtual
		if !hasConfigMap(w, "orphan") {
			t.Error("the owner went before its dependents were orphaned")
		}
		if o := s.get("of-background"); o.DeletionTimestamp != nil {
			t.Error("a dependent was deleted while its server did not answer")
		}
		s.set(false)
		time.Sleep(5 * time.Minute) // virtual
		for _, name := range []string{"of-background", "of-foreground"} {
			if o := s.get(name); o == nil || o.DeletionTimestamp == nil {
				t.Errorf("%s is not being deleted: %v", name, o)
			}
		}
		if !hasConfigMap(w, "foreground") {
			t.Error("the owner did not wait for its aggregated dependent")
		}
		if o := s.get("of-orphan"); hasConfigMap(w, "orphan") || o == nil || len(o.OwnerReferences) > 0 ||
			o.DeletionTimestamp != nil {
			t.Errorf("owner there: %v; the orphan: %v", hasConfigMap(w, "orphan"), o)
		}
		s.mu.Lock()
		delete(s.objects, flunderPath+"/of-foreground")
		s.mu.Unlock()
		time.Sleep(30 * time.Minute) // virtual
		if hasConfigMap(w, "foreground") {
			t.Error("the owner is still there after its last dependent")
		}
	})
}

// P28: no call changes an object of an aggregated API after the leadership has ended.
func TestAggregatedObjectsAreSafeFromAnEndedLeadership(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		w.Replaced.Store(true)
		s.put("dependent", nil, metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "never", UID: "u"})
		time.Sleep(5 * time.Minute) // virtual
		if s.get("dependent") == nil {
			t.Error("the dependent was deleted by a replica that does not lead")
		}
		w.Replaced.Store(false)
		time.Sleep(5 * time.Minute) // virtual
		if s.get("dependent") != nil {
			t.Error("the dependent was not deleted by the leader")
		}
	})
}
