package watchcache

import (
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
)

// filter selects the objects of a list or watch.
type filter struct {
	kind         *api.Kind
	acceptsLight bool   // the caller accepts objects in the light form (see light.go)
	prefix       string // key prefix: "" or "namespace/"
	exact        string // the only matching key; "" = all keys with the prefix
	// indexed is the required value of the storage's indexed field (api.Index); nil = any value.
	indexed *string
	labels  labels.Selector
	fields  fields.Selector
	// selector on fields of the kind's version, evaluated by Served.matchConverted after conversion
	versionFields fields.Selector
}

// newFilter returns the filter for the namespace, name and selectors of a request. Its errors are
// StatusErrors (400).
func newFilter(req *api.Request, o *metav1.ListOptions) (*filter, error) {
	f := &filter{kind: req.Kind, acceptsLight: req.Internal.Light}
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
		f.setFields(sel)
	}
	if req.Name != "" {
		f.setExactKey(req.Namespace, req.Name)
	}
	return f, nil
}

// maxTerms is the maximum number of terms of a selector, which are evaluated for every change and
// watch. The values of a set, as in "app in (a, b)", count as one term, because their number does
// not affect the cost.
const maxTerms = 256

func tooManyTerms(selector string, n int) error {
	return apierrors.NewBadRequest(fmt.Sprintf("the %s selector has %d terms, at most %d are evaluated: write several "+
		"values of one key as a set",
		selector, n, maxTerms))
}

// checkFields returns an error (400) if a selector uses fields that the kind does not support.
func (f *filter) checkFields(selector fields.Selector) error {
	known := f.fieldSet(f.kind.Storage.Hub.New())
	for _, r := range selector.Requirements() {
		if _, ok := known[r.Field]; !ok {
			return apierrors.NewBadRequest(fmt.Sprintf("field label not supported: %s", r.Field))
		}
	}
	return nil
}

// setFields adds a field selector to the filter. If the selector requires a name or namespace, it
// also restricts the key range.
func (f *filter) setFields(selector fields.Selector) {
	if selector.Empty() {
		return
	}
	if f.usesVersionFields(selector) {
		f.versionFields = selector
	} else {
		f.fields = selector
	}
	if i := f.kind.Storage.Index; i != nil {
		if value, ok := selector.RequiresExactMatch(i.Field); ok {
			f.indexed = &value
		}
	}
	ns, ok := selector.RequiresExactMatch("metadata.namespace")
	if ok && f.kind.Namespaced && f.prefix == "" && ns != "" {
		f.prefix = ns + "/"
	}
	if name, ok := selector.RequiresExactMatch("metadata.name"); ok && name != "" {
		f.setExactKey(strings.TrimSuffix(f.prefix, "/"), name)
	}
}

// usesVersionFields reports whether a selector uses fields of the kind's version. Such a selector
// must be evaluated on converted objects, because the stored version may lack the fields.
func (f *filter) usesVersionFields(selector fields.Selector) bool {
	if !f.kind.Lists.FieldsOfVersion {
		return false
	}
	return slices.ContainsFunc(selector.Requirements(), func(r fields.Requirement) bool {
		return r.Field != "metadata.name" && r.Field != "metadata.namespace"
	})
}

// setExactKey restricts the filter to the object with the given name. It does nothing if the kind
// is namespaced and the namespace is empty.
func (f *filter) setExactKey(namespace, name string) {
	if !f.kind.Namespaced || namespace != "" {
		f.exact = storedform.ObjectKey(f.kind, namespace, name)
	}
}

func (f *filter) fieldSet(obj api.Object) fields.Set {
	set := fields.Set{"metadata.name": obj.GetName()}
	if f.kind.Namespaced {
		set["metadata.namespace"] = obj.GetNamespace()
	}
	if f.kind.Lists.Fields != nil {
		for k, v := range f.kind.Lists.Fields(obj) {
			set[k] = v
		}
	}
	return set
}

// isSelective reports whether the filter has selectors. They may exclude objects in the key range.
func (f *filter) isSelective() bool {
	return f.labels != nil || f.fields != nil || f.versionFields != nil
}

// isInRange reports whether a key, relative to the storage's prefix, is in the filter's key range.
func (f *filter) isInRange(key string) bool {
	if f.exact != "" {
		return key == f.exact
	}
	return strings.HasPrefix(key, f.prefix)
}

func (f *filter) matchesEntry(e *Entry) bool {
	return f.isInRange(e.key) && f.matchesSelectors(e.Object)
}

// mayMatch reports whether the key and the indexed field of an object state match the filter. It
// returns false if state is nil.
func (f *filter) mayMatch(state *objectState) bool {
	return state != nil && f.isInRange(state.key) && (f.indexed == nil || *f.indexed == state.field)
}

// matchesSelectors reports whether an object in the key range matches the selectors. It does not
// evaluate versionFields.
func (f *filter) matchesSelectors(obj api.Object) bool {
	if f.labels != nil && !f.labels.Matches(labels.Set(obj.GetLabels())) {
		return false
	}
	return f.fields == nil || f.fields.Matches(f.fieldSet(obj))
}

// isAffected reports whether a change may concern a watch with this filter: the object matches
// before or after the change. If a decoded object of the change was evicted from the history, its
// selectors are not evaluated and it may return true without need.
func (f *filter) isAffected(ev *event) bool { return f.isVisible(ev.cur) || f.isVisible(ev.prev) }

func (f *filter) isVisible(m *objectState) bool {
	if !f.mayMatch(m) {
		return false
	}
	e := m.entry.Load()
	return e == nil || f.matchesSelectors(e.Object)
}

// visitMatches calls visit for the entries of a snapshot that match the filter, in key order, until
// visit returns false. It starts behind the key after ("" = from the start).
func (f *filter) visitMatches(s *snapshot, after string, visit func(*Entry) bool) {
	if f.exact != "" {
		if e, ok := s.byKey.Get(f.exact); ok && e.key > after && f.matchesEntry(e) {
			visit(e)
		}
		return
	}
	s.visitRange(f.indexed, f.prefix, after, func(e *Entry) bool { return !f.matchesSelectors(e.Object) || visit(e) })
}
