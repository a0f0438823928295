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

// filter is which objects of a kind a list or watch wants.
type filter struct {
	kind   *api.Kind
	light  bool   // the light form of the objects will do
	prefix string // of the keys: "" or "namespace/"
	exact  string // the one key; "" = all below prefix
	// indexed is the one value of the field that the storage has an index of; nil = any.
	indexed *string
	labels  labels.Selector
	fields  fields.Selector
	late    fields.Selector // on fields of the kind's version; selects and matches leave it to served.sift
}

// newFilter reads the selectors of a request. Errors are StatusErrors (400).
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

// maxTerms bounds what is looked at for every change and every watch. The values of a set, as in "app in (a, b)", are no
// terms: any number of them costs the same.
const maxTerms = 256

func tooManyTerms(what string, n int) error {
	return apierrors.NewBadRequest(fmt.Sprintf("the %s selector has %d terms, at most %d are evaluated: write several values of one key as a set",
		what, n, maxTerms))
}

// checkFields refuses selectors on fields that the kind does not offer.
func (f *filter) checkFields(sel fields.Selector) error {
	known := f.fieldSet(f.kind.Storage.Hub.New())
	for _, r := range sel.Requirements() {
		if _, ok := known[r.Field]; !ok {
			return apierrors.NewBadRequest(fmt.Sprintf("field label not supported: %s", r.Field))
		}
	}
	return nil
}

// narrow keeps the field selector, and turns exact names and namespaces into key ranges.
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

// ofVersion says that a selector asks for fields which an object has in the kind's version, and perhaps in no other.
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

// selective says that objects inside the key range may still not match.
func (f *filter) selective() bool { return f.labels != nil || f.fields != nil || f.late != nil }

// within says that a key is in the range.
func (f *filter) within(key string) bool {
	if f.exact != "" {
		return key == f.exact
	}
	return strings.HasPrefix(key, f.prefix)
}

func (f *filter) matches(e *entry) bool { return f.within(e.key) && f.selects(e.obj) }

// mayMatch judges a moment by what is known of it without its object.
func (f *filter) mayMatch(m *moment) bool {
	return m != nil && f.within(m.key) && (f.indexed == nil || *f.indexed == m.field)
}

// selects judges an object inside the key range.
func (f *filter) selects(obj api.Object) bool {
	if f.labels != nil && !f.labels.Matches(labels.Set(obj.GetLabels())) {
		return false
	}
	return f.fields == nil || f.fields.Matches(f.fieldSet(obj))
}

// concerned says that a change is visible through the filter. Of one that is packed it may say so when it is not.
func (f *filter) concerned(ev *event) bool { return f.shown(ev.cur) || f.shown(ev.prev) }

func (f *filter) shown(m *moment) bool {
	if !f.mayMatch(m) {
		return false
	}
	e := m.live.Load()
	return e == nil || f.selects(e.obj)
}

// scan calls visit with the matching entries after key (or from the start), in key order, until it returns false.
func (f *filter) scan(s *snapshot, after string, visit func(*entry) bool) {
	if f.exact != "" {
		if e, ok := s.byKey.Get(f.exact); ok && e.key > after && f.matches(e) {
			visit(e)
		}
		return
	}
	s.ascend(f.indexed, f.prefix, after, func(e *entry) bool { return !f.selects(e.obj) || visit(e) })
}
