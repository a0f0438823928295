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

// definition is a CustomResourceDefinition with the kinds that serve it.
type definition struct {
	*apiextensionsv1.CustomResourceDefinition
	versions map[string]*version
	storage  *api.Storage
	kinds    []*api.Kind
	convert  converter
}

// served reports whether the kinds of a definition are to be served: it is established.
func served(c *apiextensionsv1.CustomResourceDefinition) bool {
	return apihelpers.IsCRDConditionTrue(c, apiextensionsv1.Established)
}

// same reports whether the kinds created for definition a are also valid for b. a must be a result
// of custom.Pack.
func same(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	return a.UID == b.UID && names(&a.Status.AcceptedNames, &b.Status.AcceptedNames) &&
		(a.Generation == b.Generation || sameSpec(a, b))
}

// define creates the kinds of a definition. The definition c is shared and is not modified; of is
// the kind CustomResourceDefinition.
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

// kind creates the kind of one version of the definition.
func (d *definition) kind(r custom.Resource, v *version) *api.Kind {
	k := custom.NewKind(r, v.spec.Name, v.hasStatus(), d.storage)
	k.New = custom.Shaped(v)
	k.ListKind, k.Definition, k.Deprecated = d.Status.AcceptedNames.ListKind, d.Name, d.deprecation(v)
	j := &judge{of: v, whole: k.Validate, changed: k.ValidateUpdate}
	k.Check = j.check
	k.Default = func(o api.Object) {
		// An error is reported by validation.
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
	k.Types = sync.OnceValue(v.types) // once, since an apply needs the same converter throughout
	k.Model = v.model
	return k
}

// detach gives an object its own copy of its content.
func detach(o *custom.Object) *custom.Object {
	o.Content = o.DeepCopy().Content
	return o
}

// deprecation returns the warning for clients of a deprecated version; "" for other versions.
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
