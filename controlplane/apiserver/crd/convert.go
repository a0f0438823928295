package crd

import (
	"context"
	"net"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// Hooks are the ways out of this process.
type Hooks struct {
	// ForService returns what dials an endpoint of a port of a Service.
	ForService func(namespace, name string, port int32) func(ctx context.Context, network, address string) (net.Conn, error)
}

// converter brings objects of any version into another.
type converter struct {
	local bool // nobody outside is asked
	to    func(ctx context.Context, objs []api.Object, v *version) ([]api.Object, error)
	close func() // nil = nothing is to be let go when the definition has gone
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

// renamed is strategy None: the object says that it is of another version, and keeps what that knows.
func renamed(o api.Object, v *version) (api.Object, error) {
	out := o.(*custom.Object).DeepCopy()
	out.SetGroupVersionKind(v.gvk)
	if _, err := v.Fit(out, false); err != nil {
		return nil, err
	}
	return out, nil
}

// sameSpec compares definitions, of which the first is packed.
func sameSpec(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	b, err := custom.Pack(b)
	return err == nil && equality.Semantic.DeepEqual(&a.Spec, &b.Spec)
}

func names(a, b *apiextensionsv1.CustomResourceDefinitionNames) bool {
	return equality.Semantic.DeepEqual(a, b)
}
