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

// CheckProto returns an error for a protobuf message that exceeds the limits. target is a value of
// the message's Go type: two bytes of an empty message may become a large struct. It does not
// report malformed data, which the decoder rejects.
func CheckProto(data []byte, target any) error {
	t := reflect.TypeOf(target)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	var c Counts
	c.countMessage(data, t, 0)
	if c.quantity > MaxQuantity {
		return fmt.Errorf("%w: a quantity of %d bytes, at most %d are read", ErrTooMuch, c.quantity, MaxQuantity)
	}
	if c.exponent {
		return fmt.Errorf("%w: a quantity whose exponent has more than %d digits", ErrTooMuch,
			quantitytext.MaxExponentDigits)
	}
	return c.CheckLimits(target)
}

// countMessage adds the contents of a protobuf message to the counts. t is the struct type of the
// message.
func (c *Counts) countMessage(data []byte, t reflect.Type, depth int) {
	if depth > MaxDepth {
		c.deep = true
		return
	}
	fields := protoFields(t)
	var sizes map[protowire.Number]int
	defer func() {
		for num, n := range sizes {
			c.endContainer(n, fields[num].repeated && fields[num].message == nil)
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
			c.quantity = max(c.quantity, len(value)) // includes a few bytes for tags and lengths
		}
		if inner, n := protowire.ConsumeBytes(value); typ == protowire.BytesType && n >= 0 && f.message != nil {
			c.countMessage(inner, f.message, depth+1)
		}
	}
}

// protoField describes a field of a protobuf message, and its Go type if it is a message itself.
type protoField struct {
	repeated bool
	member   bool         // the field contains entries of a map
	message  reflect.Type // nil if the field is not a message
}

var fieldsByType sync.Map // map[reflect.Type]map[protowire.Number]protoField

// protoFields returns the fields of a struct type, from the struct tags that Kubernetes' protobuf
// generator writes. Results are cached.
func protoFields(t reflect.Type) map[protowire.Number]protoField {
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
		case reflect.Map: // an entry is a message with key and value
			f.repeated, f.member = false, true
			f.message = mapEntryType(of)
		}
		fields[protowire.Number(n)] = f
	}
	fieldsByType.Store(t, fields)
	return fields
}

// mapEntryType returns a struct type for the entries of the map type m.
func mapEntryType(m reflect.Type) reflect.Type {
	field := func(name string, n int, t reflect.Type) reflect.StructField {
		return reflect.StructField{Name: name, Type: t,
			Tag: reflect.StructTag(fmt.Sprintf(`protobuf:"bytes,%d,opt"`, n))}
	}
	return reflect.StructOf([]reflect.StructField{field("Key", 1, m.Key()), field("Value", 2, m.Elem())})
}
