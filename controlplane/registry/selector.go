package registry

import (
	"fmt"
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
	prefix string // of the keys: "" or "namespace/"
	exact  string // the one key; "" = all below prefix
	labels labels.Selector
	fields fields.Selector
}

// newFilter reads the selectors of a request. Errors are StatusErrors (400).
func newFilter(req *api.Request, o *metav1.ListOptions) (*filter, error) {
	f := &filter{kind: req.Kind}
	if req.Kind.Namespaced && req.Namespace != "" {
		f.prefix = req.Namespace + "/"
	}
	if o.LabelSelector != "" {
		sel, err := labels.Parse(o.LabelSelector)
		if err != nil {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("unable to parse requirement: %v", err))
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

// checkFields refuses selectors on fields that the kind does not offer.
func (f *filter) checkFields(sel fields.Selector) error {
	known := f.fieldSet(f.kind.New())
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
	f.fields = sel
	if ns, ok := sel.RequiresExactMatch("metadata.namespace"); ok && f.kind.Namespaced && f.prefix == "" && ns != "" {
		f.prefix = ns + "/"
	}
	if name, ok := sel.RequiresExactMatch("metadata.name"); ok && name != "" {
		f.exactly(strings.TrimSuffix(f.prefix, "/"), name)
	}
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
func (f *filter) selective() bool { return f.labels != nil || f.fields != nil }

func (f *filter) matches(e *entry) bool {
	if f.exact != "" {
		if e.key != f.exact {
			return false
		}
	} else if !strings.HasPrefix(e.key, f.prefix) {
		return false
	}
	return f.selects(e.obj)
}

// selects judges an object inside the key range.
func (f *filter) selects(obj api.Object) bool {
	if f.labels != nil && !f.labels.Matches(labels.Set(obj.GetLabels())) {
		return false
	}
	return f.fields == nil || f.fields.Matches(f.fieldSet(obj))
}

// concerned says that the change is visible through the filter.
func (f *filter) concerned(ev *event) bool {
	return f.matches(ev.cur) || (ev.prev != nil && f.matches(ev.prev))
}

// scan calls visit with the matching entries after key (or from the start), in key order, until it returns false.
func (f *filter) scan(s *snapshot, after string, visit func(*entry) bool) {
	if f.exact != "" {
		if e, ok := s.objects.Get(f.exact); ok && e.key > after && f.matches(e) {
			visit(e)
		}
		return
	}
	s.objects.Ascend(max(f.prefix, after), func(key string, e *entry) bool {
		if !strings.HasPrefix(key, f.prefix) {
			return false
		}
		if key == after || !f.selects(e.obj) {
			return true
		}
		return visit(e)
	})
}
