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

// isServed reports whether the kinds of a definition are to be served, that is, whether the
// definition is established.
func isServed(c *apiextensionsv1.CustomResourceDefinition) bool {
	return apihelpers.IsCRDConditionTrue(c, apiextensionsv1.Established)
}

// isCompatible reports whether the kinds that were created for definition a are also valid for b. a
// must be a result of custom.Pack.
func isCompatible(a, b *apiextensionsv1.CustomResourceDefinition) bool {
	return a.UID == b.UID && equalNames(&a.Status.AcceptedNames, &b.Status.AcceptedNames) &&
		(a.Generation == b.Generation || sameSpec(a, b))
}

// newDefinition creates the kinds of a CustomResourceDefinition. It does not modify c. kind is the
// kind CustomResourceDefinition itself.
func newDefinition(c *apiextensionsv1.CustomResourceDefinition, kind *api.Kind, hooks Hooks) (*definition, error) {
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
	d.convert = d.newConverter(hooks)
	d.storage = custom.NewStorage(r, hub, known...)
	d.storage.Hub.New = custom.NewShaped(d.versions[hub])
	for i := range d.storage.Known {
		d.storage.Known[i].New = custom.NewShaped(d.versions[known[i]])
		if d.convert.local {
			d.storage.Known[i].ToHub = func(o api.Object) (api.Object, error) { return withVersion(o, d.versions[hub]) }
		}
	}
	ref := api.Ref{Kind: kind, Name: c.Name}
	for i := range c.Spec.Versions {
		if v := d.versions[c.Spec.Versions[i].Name]; v.spec.Served || v.spec.Storage {
			k := d.newKind(r, v)
			k.Serving.Hidden = !v.spec.Served
			k.Commit.Presence = func() (api.Ref, types.UID) { return ref, c.UID }
			d.kinds = append(d.kinds, k)
		}
	}
	return d, nil
}

// newKind creates the kind of one version of the definition.
func (d *definition) newKind(r custom.Resource, v *version) *api.Kind {
	k := custom.NewKind(r, v.spec.Name, v.hasStatus(), d.storage)
	k.Type.New = custom.NewShaped(v)
	k.Naming.ListKind, k.Serving.Definition, k.Serving.Deprecated = d.Status.AcceptedNames.ListKind, d.Name,
		d.deprecationWarning(v)
	j := &validator{version: v, whole: k.Validation.Object, changed: k.Validation.Update}
	k.Validation.Check = j.validateFacet
	k.Writes.Default = func(o api.Object) {
		// An error is reported by validation.
		_, _ = v.Fit(detachContent(o.(*custom.Object)), false)
	}
	setColumns(k, v.spec)
	if s := v.scaleSubresource(); s != nil {
		if k.Subresources == nil {
			k.Subresources = map[string]*api.Subresource{}
		}
		k.Subresources["scale"] = scaleOf(s)
	}
	if len(v.spec.SelectableFields) > 0 {
		paths := selectableFields(v.spec)
		k.Lists.FieldsOfVersion = len(d.Spec.Versions) > 1
		k.Lists.Fields = func(o api.Object) fields.Set {
			set := make(fields.Set, len(paths))
			for _, p := range paths {
				set[p.name] = p.fieldValue(o.(*custom.Object).Content)
			}
			return set
		}
	}
	if d.storage.Hub.GVK.Version != v.spec.Name || !d.convert.local {
		k.Conversion = &api.Conversion{
			From: func(ctx context.Context, objs []api.Object) ([]api.Object, error) {
				return d.convert.convert(ctx, objs, v)
			},
			To: func(ctx context.Context, obj api.Object) (api.Object, error) {
				out, err := d.convert.convert(ctx, []api.Object{obj}, d.versions[d.storage.Hub.GVK.Version])
				if err != nil {
					return nil, err
				}
				return out[0], nil
			},
		}
	}
	k.Schema.Types = sync.OnceValue(v.typeConverter) // once, since an apply needs the same converter throughout
	k.Schema.Model = v.publishedModel
	return k
}

// detachContent gives an object a copy of its content that no other object shares.
func detachContent(o *custom.Object) *custom.Object {
	o.Content = o.DeepCopy().Content
	return o
}

// deprecationWarning returns the warning that clients of version v receive; "" if v is not
// deprecated.
func (d *definition) deprecationWarning(v *version) string {
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
