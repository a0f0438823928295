package crd

import (
	"context"
	"net"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// Hooks contains the functions for connections to conversion webhooks.
type Hooks struct {
	// ForService returns a dial function that reaches a backend of a Service's port.
	ForService func(namespace, name string, port int32) func(ctx context.Context, network, address string) (net.Conn, error)
}

// converter converts objects of any version into another one.
type converter struct {
	local bool // no webhook is called
	to    func(ctx context.Context, objs []api.Object, v *version) ([]api.Object, error)
	close func() // called when the definition is removed or replaced; nil = nothing to do
}

func (d *definition) converter(hooks Hooks) converter {
	if c := d.Spec.Conversion; c != nil && c.Strategy == apiextensionsv1.WebhookConverter {
		w := newWebhook(d.CustomResourceDefinition, hooks)
		return converter{to: w.convert, close: w.close}
	}
	return converter{local: true, to: func(_ context.Context, objs []api.Object, v *version) ([]api.Object, error) {
		out := make([]api.Object, len(objs))
		for i, o := range objs {
			var err error
			if out[i], err = renamed(o, v); err != nil {
				return nil, err
			}
		}
		return out, nil
	}}
}

// renamed returns a copy of the object with the version v, pruned and defaulted by its schema. This
// is the conversion strategy None.
func renamed(o api.Object, v *version) (api.Object, error) {
	out := o.(*custom.Object).DeepCopy()
	out.SetGroupVersionKind(v.gvk)
	if _, err := v.Fit(out, false); err != nil {
		return nil, err
	}
	return out, nil
}

// sameSpec reports whether two definitions have equal specs. a must be a result of custom.Pack.
func sameSpec(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	b, err := custom.Pack(b)
	return err == nil && equality.Semantic.DeepEqual(&a.Spec, &b.Spec)
}

func names(a, b *apiextensionsv1.CustomResourceDefinitionNames) bool {
	return equality.Semantic.DeepEqual(a, b)
}
