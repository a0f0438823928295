package decodelimits

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"

	"keelson.dev/keelson/internal/quantitytext"
)

// CheckProto refuses a protobuf message of the Go type of into beyond the limits:
// two bytes of an empty message may become a large struct, too. What is malformed
// is left to the decoder.
func CheckProto(data []byte, into any) error {
	t := reflect.TypeOf(into)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	var c Counts
	c.message(data, t, 0)
	if c.quantity > MaxQuantity {
		return fmt.Errorf("%w: a quantity of %d bytes, at most %d are read", ErrTooMuch, c.quantity, MaxQuantity)
	}
	if c.exponent {
		return fmt.Errorf("%w: a quantity whose exponent has more than %d digits", ErrTooMuch, quantitytext.MaxExponent)
	}
	return c.Check(into)
}

// message counts what a message of a struct type holds.
func (c *Counts) message(data []byte, t reflect.Type, depth int) {
	if depth > MaxDepth {
		c.deep = true
		return
	}
	fields := fieldsOf(t)
	var sizes map[protowire.Number]int
	defer func() {
		for num, n := range sizes {
			c.close(n, fields[num].repeated && fields[num].message == nil)
		}
	}()
	for len(data) > 0 && c.Values <= MaxValues {
		num, typ, n := protowire.ConsumeTag(data)
		if n < 0 {
			return
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(num, typ, data); n < 0 {
			return
		}
		value := data[:n]
		data = data[n:]
		c.Values++
		if text, n := protowire.ConsumeBytes(value); t == quantityType && typ == protowire.BytesType && n >= 0 {
			c.exponent = c.exponent || quantitytext.HasLongExponent(string(text))
		}
		f, known := fields[num]
		if !known {
			continue
		}
		if f.repeated {
			c.Items++
		}
		if f.repeated || f.member {
			if sizes == nil {
				sizes = make(map[protowire.Number]int)
			}
			sizes[num]++
		}
		if f.message != nil {
			c.Objects++
		}
		if f.message == quantityType {
			c.quantity = max(c.quantity, len(value)) // with lengths and tags, of which it has few bytes
		}
		if inner, n := protowire.ConsumeBytes(value); typ == protowire.BytesType && n >= 0 && f.message != nil {
			c.message(inner, f.message, depth+1)
		}
	}
}

// protoField is what a field of a message becomes.
type protoField struct {
	repeated bool
	member   bool         // of a map
	message  reflect.Type // nil when it is no struct
}

var fieldsByType sync.Map // of map[protowire.Number]protoField, by reflect.Type

// fieldsOf reads the tags that Kubernetes' generator leaves in its types.
func fieldsOf(t reflect.Type) map[protowire.Number]protoField {
	if known, ok := fieldsByType.Load(t); ok {
		return known.(map[protowire.Number]protoField)
	}
	fields := make(map[protowire.Number]protoField)
	for i := range t.NumField() {
		parts := strings.Split(t.Field(i).Tag.Get("protobuf"), ",")
		if len(parts) < 3 {
			continue
		}
		n, err := strconv.Atoi(parts[1])
		if err != nil {
			continue
		}
		f := protoField{repeated: parts[2] == "rep"}
		of := t.Field(i).Type
		for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
			of = of.Elem()
		}
		switch of.Kind() {
		case reflect.Struct:
			f.message = of
		case reflect.Map: // an entry is a message of key and value
			f.repeated, f.member = false, true
			f.message = entryOf(of)
		}
		fields[protowire.Number(n)] = f
	}
	fieldsByType.Store(t, fields)
	return fields
}

// entryOf is a struct whose fields are those of a map's entries.
func entryOf(m reflect.Type) reflect.Type {
	field := func(name string, n int, t reflect.Type) reflect.StructField {
		return reflect.StructField{Name: name, Type: t, Tag: reflect.StructTag(fmt.Sprintf(`protobuf:"bytes,%d,opt"`, n))}
	}
	return reflect.StructOf([]reflect.StructField{field("Key", 1, m.Key()), field("Value", 2, m.Elem())})
}
