// Package admissiontest contains a cluster in memory and attempts for the tests of admission
// plugins.
package admissiontest

import (
	"context"

	"keelson.dev/keelson/controlplane/api"
)

// World is an admission.Cluster in memory. It maps the name of a resource to the objects of the
// resource.
type World map[string][]api.Object

// Get returns an object of the world. It implements admission.Cluster.
func (w World) Get(_ context.Context, resource, namespace, name string) (api.Object, bool) {
	for _, o := range w[resource] {
		if o.GetNamespace() == namespace && o.GetName() == name {
			return o, true
		}
	}
	return nil, false
}

// Newest returns the same object as Get. It implements admission.Cluster.
func (w World) Newest(ctx context.Context, resource, namespace, name string) (api.Object, bool) {
	return w.Get(ctx, resource, namespace, name)
}

// List returns the objects of a namespace ("" = all namespaces). It implements admission.Cluster.
func (w World) List(_ context.Context, resource, namespace string, _ bool) ([]api.Object, error) {
	var found []api.Object
	for _, o := range w[resource] {
		if namespace == "" || o.GetNamespace() == namespace {
			found = append(found, o)
		}
	}
	return found, nil
}

// ListHeld returns the objects of a kind in a namespace. Tests use it as the field ListHeld of a
// plugin configuration.
func (w World) ListHeld(ctx context.Context, k *api.Kind, namespace, _ string) ([]api.Object, error) {
	return w.List(ctx, k.Resource, namespace, false)
}

// CreateAttempt returns the attempt to create o.
func CreateAttempt(all *api.Kinds, o api.Object) *api.Attempt {
	k := all.ByType(o)
	return &api.Attempt{Kind: k, Operation: api.Create, Namespace: o.GetNamespace(), Name: o.GetName(),
		Object: o, Whole: o,
		Request: &api.Request{Verb: api.VerbCreate, Kind: k, Namespace: o.GetNamespace(), Name: o.GetName()}}
}

// UpdateAttempt returns the attempt to replace the stored object by o.
func UpdateAttempt(all *api.Kinds, stored, o api.Object) *api.Attempt {
	a := CreateAttempt(all, o)
	a.Operation, a.Stored, a.Request.Verb = api.Update, stored, api.VerbUpdate
	return a
}

// ErrorText returns the text of err, "" for nil.
func ErrorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
