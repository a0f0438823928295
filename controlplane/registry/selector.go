package registry

import (
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/api"
)

// filter selects the objects of a list or watch.
type filter struct {
	kind   *api.Kind
	light  bool   // the light form of the objects is sufficient
	prefix string // key prefix: "" or "namespace/"
	exact  string // the only matching key; "" = all keys with the prefix
	// indexed is the required value of the storage's indexed field; nil = any.
	indexed *string
	labels  labels.Selector
	fields  fields.Selector
	late    fields.Selector // on fields of the kind's version, evaluated by served.sift after conversion
}

// newFilter parses the selectors of a request. Its errors are StatusErrors (400).
func newFilter(req *api.Request, o *metav1.ListOptions) (*filter, error) {
	f := &filter{kind: req.Kind, light: req.Light}
	if req.Kind.Namespaced && req.Namespace != "" {
		f.prefix = req.Namespace + "/"
	}
	if o.LabelSelector != "" {
		sel, err := labels.Parse(o.LabelSelector)
		if err != nil {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("unable to parse requirement: %v", err))
		}
		if terms, _ := sel.Requirements(); len(terms) > maxTerms {
			return nil, tooManyTerms("label", len(terms))
		}
		if !sel.Empty() {
			f.labels = sel
		}
	}
	if o.FieldSelector != "" {
		sel, err := fields.ParseSelector(o.FieldSelector)
		if err != nil {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("unable to parse field selector: %v", err))
		}
		if terms := len(sel.Requirements()); terms > maxTerms {
			return nil, tooManyTerms("field", terms)
		}
		if err := f.checkFields(sel); err != nil {
			return nil, err
		}
		f.narrow(sel)
	}
	if req.Name != "" {
		f.exactly(req.Namespace, req.Name)
	}
	return f, nil
}

// maxTerms bounds the terms that are evaluated for every change and watch. The values of a set, as
// in "app in (a, b)", count as one term, because their number does not affect the cost.
const maxTerms = 256

func tooManyTerms(what string, n int) error {
	return apierrors.NewBadRequest(fmt.Sprintf("the %s selector has %d terms, at most %d are evaluated: write several values of one key as a set",
		what, n, maxTerms))
}

// checkFields rejects selectors on fields that the kind does not support.
func (f *filter) checkFields(sel fields.Selector) error {
	known := f.fieldSet(f.kind.Storage.Hub.New())
	for _, r := range sel.Requirements() {
		if _, ok := known[r.Field]; !ok {
			return apierrors.NewBadRequest(fmt.Sprintf("field label not supported: %s", r.Field))
		}
	}
	return nil
}

// narrow sets the field selector, and reduces the key range for exact names and namespaces.
func (f *filter) narrow(sel fields.Selector) {
	if sel.Empty() {
		return
	}
	if f.ofVersion(sel) {
		f.late = sel
	} else {
		f.fields = sel
	}
	if i := f.kind.Storage.Index; i != nil {
		if value, ok := sel.RequiresExactMatch(i.Field); ok {
			f.indexed = &value
		}
	}
	if ns, ok := sel.RequiresExactMatch("metadata.namespace"); ok && f.kind.Namespaced && f.prefix == "" && ns != "" {
		f.prefix = ns + "/"
	}
	if name, ok := sel.RequiresExactMatch("metadata.name"); ok && name != "" {
		f.exactly(strings.TrimSuffix(f.prefix, "/"), name)
	}
}

// ofVersion reports whether a selector uses fields that may exist only in the kind's version.
func (f *filter) ofVersion(sel fields.Selector) bool {
	return f.kind.FieldsOfVersion && slices.ContainsFunc(sel.Requirements(), func(r fields.Requirement) bool {
		return r.Field != "metadata.name" && r.Field != "metadata.namespace"
	})
}

func (f *filter) exactly(namespace, name string) {
	if !f.kind.Namespaced || namespace != "" {
		f.exact = objectKey(f.kind, namespace, name)
	}
}

func (f *filter) fieldSet(obj api.Object) fields.Set {
	set := fields.Set{"metadata.name": obj.GetName()}
	if f.kind.Namespaced {
		set["metadata.namespace"] = obj.GetNamespace()
	}
	if f.kind.Fields != nil {
		for k, v := range f.kind.Fields(obj) {
			set[k] = v
		}
	}
	return set
}

// selective reports whether objects in the key range may not match.
func (f *filter) selective() bool { return f.labels != nil || f.fields != nil || f.late != nil }

// within reports whether a key is in the filter's range.
func (f *filter) within(key string) bool {
	if f.exact != "" {
		return key == f.exact
	}
	return strings.HasPrefix(key, f.prefix)
}

func (f *filter) matches(e *entry) bool { return f.within(e.key) && f.selects(e.obj) }

// mayMatch reports whether a moment may match, without its decoded object.
func (f *filter) mayMatch(m *moment) bool {
	return m != nil && f.within(m.key) && (f.indexed == nil || *f.indexed == m.field)
}

// selects reports whether an object in the key range matches the selectors, except late.
func (f *filter) selects(obj api.Object) bool {
	if f.labels != nil && !f.labels.Matches(labels.Set(obj.GetLabels())) {
		return false
	}
	return f.fields == nil || f.fields.Matches(f.fieldSet(obj))
}

// concerned reports whether a change is visible through the filter. For a packed change it may
// return true although it is not.
func (f *filter) concerned(ev *event) bool { return f.shown(ev.cur) || f.shown(ev.prev) }

func (f *filter) shown(m *moment) bool {
	if !f.mayMatch(m) {
		return false
	}
	e := m.live.Load()
	return e == nil || f.selects(e.obj)
}

// scan calls visit for the matching entries after a key ("" = from the start), in key order, until
// visit returns false.
func (f *filter) scan(s *snapshot, after string, visit func(*entry) bool) {
	if f.exact != "" {
		if e, ok := s.byKey.Get(f.exact); ok && e.key > after && f.matches(e) {
			visit(e)
		}
		return
	}
	s.ascend(f.indexed, f.prefix, after, func(e *entry) bool { return !f.selects(e.obj) || visit(e) })
}
