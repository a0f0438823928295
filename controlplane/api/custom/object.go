// Package custom defines the Go type of custom resources. Their metadata is typed, as in every
// other object; all other fields are untyped JSON.
package custom

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "sigs.k8s.io/json"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
)

// Object is an object of a custom resource.
type Object struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Content contains all fields except apiVersion, kind and metadata. Values are map[string]any,
	// []any, string, bool, int64, float64 and nil. Shallow copies share the map, so it must never
	// be changed in place: Set replaces it, and deeper changes need a DeepCopy.
	Content map[string]any `json:"-"`

	// Shape is the schema that is applied when a document is decoded into this object. nil accepts
	// every document. Decoding resets it to nil. Only objects from a function that NewShaped
	// returned have a Shape.
	Shape Shape `json:"-"`
}

// Shape is the schema of one version of a custom resource, as it is applied to decoded objects.
type Shape interface {
	// Fit removes fields from o that the schema does not have, and sets defaults; o is modified in
	// place. If tell is true, it returns the paths of the removed fields. It returns an error if o
	// does not conform to the schema.
	Fit(o *Object, tell bool) (dropped []string, err error)
}

var _ api.Object = (*Object)(nil)

// Set sets a top-level field of the object; nil removes it. Shallow copies that share the content
// are not changed.
func (o *Object) Set(field string, value any) {
	next := maps.Clone(o.Content)
	if value == nil {
		delete(next, field)
	} else {
		if next == nil {
			next = make(map[string]any, 1)
		}
		next[field] = value
	}
	o.Content = next
}

// DeepCopy returns a copy that shares nothing with o.
func (o *Object) DeepCopy() *Object {
	out := &Object{TypeMeta: o.TypeMeta}
	o.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	if o.Content != nil {
		out.Content = copyValue(o.Content).(map[string]any)
	}
	return out
}

// DeepCopyObject returns DeepCopy as a runtime.Object.
func (o *Object) DeepCopyObject() runtime.Object { return o.DeepCopy() }

// copyValue deep-copies a JSON value. It panics for any other type, which is a programming error.
func copyValue(v any) any {
	switch v := v.(type) {
	case map[string]any:
		if v == nil {
			return v
		}
		out := make(map[string]any, len(v))
		for key, value := range v {
			out[key] = copyValue(value)
		}
		return out
	case []any:
		if v == nil {
			return v
		}
		out := make([]any, len(v))
		for i, value := range v {
			out[i] = copyValue(value)
		}
		return out
	case nil, string, bool, int64, float64:
		return v
	}
	panic(fmt.Sprintf("custom: an object cannot contain a %T", v))
}

// own are the top-level fields of an object that are not part of Content.
var own = []string{"apiVersion", "kind", "metadata"}

// MarshalJSON encodes the fields in a fixed order: apiVersion, kind, metadata, then the content
// sorted by name.
func (o *Object) MarshalJSON() ([]byte, error) {
	var buf bytes.Buffer
	field := func(name string, value any) error {
		data, err := json.Marshal(value)
		if err != nil {
			return fmt.Errorf("field %s: %w", name, err)
		}
		key, err := json.Marshal(name)
		if err != nil {
			return err
		}
		if buf.Len() > 0 {
			buf.WriteByte(',')
		} else {
			buf.WriteByte('{')
		}
		buf.Write(key)
		buf.WriteByte(':')
		buf.Write(data)
		return nil
	}
	var errs []error
	if o.APIVersion != "" {
		errs = append(errs, field("apiVersion", o.APIVersion))
	}
	if o.Kind != "" {
		errs = append(errs, field("kind", o.Kind))
	}
	errs = append(errs, field("metadata", &o.ObjectMeta))
	for _, name := range slices.Sorted(maps.Keys(o.Content)) {
		if !slices.Contains(own, name) {
			errs = append(errs, field(name, o.Content[name]))
		}
	}
	buf.WriteByte('}')
	return buf.Bytes(), errors.Join(errs...)
}

// UnmarshalJSON replaces the object with the decoded document. Unknown fields of metadata are
// dropped.
func (o *Object) UnmarshalJSON(data []byte) error {
	_, err := o.DecodeJSON(data, false)
	return err
}

// normalizeZeros replaces each float -0 with 0, in place, and returns the value. The JSON of -0 is
// decoded as an integer, so that the object would change.
func normalizeZeros(v any) any {
	switch v := v.(type) {
	case float64:
		if v == 0 {
			return 0.0
		}
	case []any:
		for i := range v {
			v[i] = normalizeZeros(v[i])
		}
	case map[string]any:
		for name := range v {
			v[name] = normalizeZeros(v[name])
		}
	}
	return v
}

// DecodeJSON implements api.JSONDecoder. As in Kubernetes, integers become int64 if they fit, and
// all other numbers float64. If strict is true, it returns errors for duplicate fields and for
// unknown fields. These are unknown metadata fields and the fields that the object's Shape removes.
func (o *Object) DecodeJSON(data []byte, strict bool) ([]error, error) {
	if len(data) > decodelimits.MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are read", decodelimits.ErrTooMuch, len(data),
			decodelimits.MaxBytes)
	}
	if decodelimits.CountJSON(data).IsTooDeep() {
		return nil, decodelimits.ErrTooDeep()
	}
	var content map[string]any
	var told []error
	var err error
	if strict {
		told, err = kjson.UnmarshalStrict(data, &content, kjson.DisallowDuplicateFields)
	} else {
		err = kjson.UnmarshalCaseSensitivePreserveInts(data, &content)
	}
	if err != nil {
		return nil, err
	}
	if content == nil {
		return nil, errors.New("null is not an object")
	}
	if bytes.Contains(data, []byte("-0")) {
		normalizeZeros(content)
	}
	out := Object{Content: content}
	for name, into := range map[string]*string{"apiVersion": &out.APIVersion, "kind": &out.Kind} {
		if value, ok := content[name]; ok && value != nil {
			if *into, ok = value.(string); !ok {
				return nil, fmt.Errorf("%s: must be a string", name)
			}
		}
	}
	if content["metadata"] != nil {
		unknown, err := out.decodeMeta(data, strict)
		if err != nil {
			return nil, err
		}
		told = append(told, unknown...)
	}
	for _, name := range own {
		delete(content, name)
	}
	if o.Shape != nil {
		dropped, err := o.Shape.Fit(&out, strict)
		if err != nil {
			return nil, err
		}
		for _, path := range dropped {
			told = append(told, fmt.Errorf("unknown field %q", path))
		}
	}
	if len(out.Content) == 0 {
		out.Content = nil
	}
	*o = out
	return told, nil
}

// decodeMeta decodes the metadata. If strict is true, it returns an error for each unknown field.
func (o *Object) decodeMeta(data []byte, strict bool) (unknown []error, err error) {
	var doc struct {
		Metadata *metav1.ObjectMeta `json:"metadata"`
	}
	doc.Metadata = &o.ObjectMeta
	if !strict {
		return nil, kjson.UnmarshalCaseSensitivePreserveInts(data, &doc)
	}
	told, err := kjson.UnmarshalStrict(data, &doc, kjson.DisallowUnknownFields)
	for _, t := range told {
		// other errors are about the content
		if strings.HasPrefix(t.Error(), `unknown field "metadata.`) {
			unknown = append(unknown, t)
		}
	}
	return unknown, err
}

// List is a list of custom objects. As in Kubernetes, its items have apiVersion and kind.
type List struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []Object `json:"items"`
}

// DeepCopyObject returns a copy that shares nothing with l.
func (l *List) DeepCopyObject() runtime.Object {
	out := &List{TypeMeta: l.TypeMeta}
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	out.Items = make([]Object, len(l.Items))
	for i := range l.Items {
		out.Items[i] = *l.Items[i].DeepCopy()
	}
	return out
}

// statusField is the field that controllers write through the status subresource.
const statusField = "status"

// Ops returns the operations on objects of a custom kind. hasStatus reports whether the kind has a
// status subresource.
func Ops(hasStatus bool) api.Ops {
	ops := api.Ops{
		Shallow: api.ShallowOf[Object, *Object],
		Assign:  func(to, from api.Object) { *to.(*Object) = *from.(*Object) },
		List: func(items []api.Object) runtime.Object {
			l := &List{Items: make([]Object, len(items))}
			for i, o := range items {
				l.Items[i] = *o.(*Object)
			}
			return l
		},
	}
	if hasStatus {
		ops.SetStatus = func(to, from api.Object) {
			var value any
			if from != nil {
				value = from.(*Object).Content[statusField]
			}
			to.(*Object).Set(statusField, value)
		}
	}
	return ops
}

// New returns an empty object without a Shape, for api.Kind.Type.New.
func New() api.Object { return &Object{} }

// NewShaped returns a function for api.Kind.Type.New that returns empty objects with the given
// Shape.
func NewShaped(shape Shape) func() api.Object {
	return func() api.Object { return &Object{Shape: shape} }
}

// NewList returns an empty list, for api.Kind.Type.NewList.
func NewList() runtime.Object { return &List{} }
