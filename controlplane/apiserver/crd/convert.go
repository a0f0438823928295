package crd

import (
	"context"
	"net"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// Hooks contains the functions that conversion webhooks need to connect to Services.
type Hooks struct {
	// ForService returns a dial function that connects to a backend of a Service's port.
	ForService func(namespace, name string, port int32) func(ctx context.Context,
		network, address string) (net.Conn, error)
}

// converter converts objects between the versions of one definition.
type converter struct {
	local   bool // no webhook is called
	convert func(ctx context.Context, objs []api.Object, v *version) ([]api.Object, error)
	close   func() // called when the definition is removed or replaced; nil = nothing to do
}

func (d *definition) newConverter(hooks Hooks) converter {
	if c := d.Spec.Conversion; c != nil && c.Strategy == apiextensionsv1.WebhookConverter {
		w := newWebhook(d.CustomResourceDefinition, hooks)
		return converter{convert: w.convertObjects, close: w.closeEndpoint}
	}
	return converter{local: true, convert: func(_ context.Context, objs []api.Object,
		v *version) ([]api.Object, error) {
		out := make([]api.Object, len(objs))
		for i, o := range objs {
			var err error
			if out[i], err = withVersion(o, v); err != nil {
				return nil, err
			}
		}
		return out, nil
	}}
}

// withVersion returns a copy of the object in version v. Its content is unchanged, except that it
// is pruned and defaulted by the schema of v. This is the conversion strategy None.
func withVersion(o api.Object, v *version) (api.Object, error) {
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

func equalNames(a, b *apiextensionsv1.CustomResourceDefinitionNames) bool {
	return equality.Semantic.DeepEqual(a, b)
}
