package crd

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	kubeversion "k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// definition is a custom resource definition as it is served.
type definition struct {
	*apiextensionsv1.CustomResourceDefinition
	versions map[string]*version
	storage  *api.Storage
	kinds    []*api.Kind
	convert  converter
}

// served says that the kinds of a definition are to be there.
func served(c *apiextensionsv1.CustomResourceDefinition) bool {
	return apihelpers.IsCRDConditionTrue(c, apiextensionsv1.Established)
}

// same says that the kinds made of one state of a definition, which is packed, are right for another.
func same(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	return a.UID == b.UID && names(&a.Status.AcceptedNames, &b.Status.AcceptedNames) &&
		(a.Generation == b.Generation || sameSpec(a, b))
}

// define makes the kinds of a definition. The definition is shared: it never changes;
// of is the kind of definitions.
func define(c *apiextensionsv1.CustomResourceDefinition, of *api.Kind, hooks Hooks) (*definition, error) {
	c, err := custom.Pack(c)
	if err != nil {
		return nil, err
	}
	d := &definition{CustomResourceDefinition: c, versions: map[string]*version{}}
	hub, known := "", []string(nil)
	for i := range c.Spec.Versions {
		v := newVersion(c, i, schemas)
		d.versions[v.spec.Name] = v
		if v.spec.Storage {
			hub = v.spec.Name
		} else {
			known = append(known, v.spec.Name)
		}
	}
	if hub == "" {
		return nil, fmt.Errorf("%s has no storage version", c.Name)
	}
	accepted := &c.Status.AcceptedNames
	r := custom.Resource{
		Group: c.Spec.Group, Kind: accepted.Kind, Plural: accepted.Plural, Singular: accepted.Singular,
		ShortNames: accepted.ShortNames, Categories: accepted.Categories,
		Namespaced: c.Spec.Scope == apiextensionsv1.NamespaceScoped,
	}
	d.convert = d.converter(hooks)
	d.storage = custom.NewStorage(r, hub, known...)
	d.storage.Hub.New = custom.Shaped(d.versions[hub])
	for i := range d.storage.Known {
		d.storage.Known[i].New = custom.Shaped(d.versions[known[i]])
		if d.convert.local {
			d.storage.Known[i].ToHub = func(o api.Object) (api.Object, error) { return renamed(o, d.versions[hub]) }
		}
	}
	ref := api.Ref{Kind: of, Name: c.Name}
	for i := range c.Spec.Versions {
		if v := d.versions[c.Spec.Versions[i].Name]; v.spec.Served || v.spec.Storage {
			k := d.kind(r, v)
			k.Hidden = !v.spec.Served
			k.Presence = func() (api.Ref, types.UID) { return ref, c.UID }
			d.kinds = append(d.kinds, k)
		}
	}
	return d, nil
}

// kind is the kind of one served version.
func (d *definition) kind(r custom.Resource, v *version) *api.Kind {
	k := custom.NewKind(r, v.spec.Name, v.hasStatus(), d.storage)
	k.New = custom.Shaped(v)
	k.ListKind, k.Definition, k.Deprecated = d.Status.AcceptedNames.ListKind, d.Name, d.deprecation(v)
	j := &judge{of: v, whole: k.Validate, changed: k.ValidateUpdate}
	k.Check = j.check
	k.Default = func(o api.Object) {
		// What cannot be made to fit is refused when it is judged.
		_, _ = v.Fit(detach(o.(*custom.Object)), false)
	}
	printed(k, v.spec)
	if s := v.scale(); s != nil {
		if k.Subresources == nil {
			k.Subresources = map[string]*api.Subresource{}
		}
		k.Subresources["scale"] = scaleOf(s)
	}
	if len(v.spec.SelectableFields) > 0 {
		paths := selectables(v.spec)
		k.FieldsOfVersion = len(d.Spec.Versions) > 1
		k.Fields = func(o api.Object) fields.Set {
			set := make(fields.Set, len(paths))
			for _, p := range paths {
				set[p.name] = p.of(o.(*custom.Object).Content)
			}
			return set
		}
	}
	if d.storage.Hub.GVK.Version != v.spec.Name || !d.convert.local {
		k.Conversion = &api.Conversion{
			From: func(ctx context.Context, objs []api.Object) ([]api.Object, error) { return d.convert.to(ctx, objs, v) },
			To: func(ctx context.Context, obj api.Object) (api.Object, error) {
				out, err := d.convert.to(ctx, []api.Object{obj}, d.versions[d.storage.Hub.GVK.Version])
				if err != nil {
					return nil, err
				}
				return out[0], nil
			},
		}
	}
	k.Types = sync.OnceValue(v.types) // an apply needs the same one from its beginning to its end
	k.Model = v.model
	return k
}

// detach gives an object content of its own, which copies do not share.
func detach(o *custom.Object) *custom.Object {
	o.Content = o.DeepCopy().Content
	return o
}

// deprecation is what a client of a deprecated version is told.
func (d *definition) deprecation(v *version) string {
	if !v.spec.Deprecated {
		return ""
	}
	if v.spec.DeprecationWarning != nil {
		return *v.spec.DeprecationWarning
	}
	var better []string
	for i := range d.Spec.Versions {
		w := &d.Spec.Versions[i]
		if w.Served && !w.Deprecated && kubeversion.CompareKubeAwareVersionStrings(v.spec.Name, w.Name) < 0 {
			better = append(better, w.Name)
		}
	}
	text := fmt.Sprintf("%s/%s %s is deprecated", d.Spec.Group, v.spec.Name, d.Spec.Names.Kind)
	if len(better) == 0 {
		return text
	}
	slices.SortFunc(better, func(a, b string) int { return kubeversion.CompareKubeAwareVersionStrings(b, a) })
	return fmt.Sprintf("%s; use %s/%s %s", text, d.Spec.Group, better[0], d.Spec.Names.Kind)
}
