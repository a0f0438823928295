package decodelimits

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
)

// FromCBOR converts CBOR to JSON within the limits. It rejects everything that Kubernetes' decoder
// rejects, such as duplicate keys. Floating-point numbers keep their fraction, even if it is 0.
func FromCBOR(data []byte) ([]byte, error) {
	if err := CheckCBOR(data); err != nil {
		return nil, err
	}
	var doc any
	if err := direct.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	out, err := json.Marshal(fractions(doc))
	if err != nil {
		return nil, err
	}
	if len(out) > MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes when it is written out, at most %d are read", ErrTooMuch, len(out), MaxBytes)
	}
	return out, nil
}

// fractions replaces floating-point numbers that JSON would encode without a fraction, in place.
func fractions(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			v[key] = fractions(value)
		}
	case []any:
		for i := range v {
			v[i] = fractions(v[i])
		}
	case float64:
		text := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return json.Number(text)
	}
	return v
}

// CheckCBOR returns an error for a data item beyond the limits. Malformed data is left to the
// decoder.
func CheckCBOR(data []byte) error {
	var c Counts
	c.cbor(data, 0)
	return c.Check(nil)
}

// The CBOR major types that contain data, and the encoding of an indefinite length.
const (
	cborBytes = 2
	cborText  = 3
	cborArray = 4
	cborMap   = 5
	cborTag   = 6
	untilEnd  = ^uint64(0)
	cborBreak = 0xff
)

// cbor counts one data item and returns the data after it. ok is false if the data is malformed or
// beyond a limit, so that counting stops.
func (c *Counts) cbor(data []byte, depth int) (rest []byte, ok bool) {
	if depth > MaxDepth {
		c.deep = true
	}
	if c.deep || c.Values > MaxValues {
		return nil, false
	}
	major, n, data, ok := cborHead(data)
	if !ok {
		return nil, false
	}
	if major != cborTag {
		c.Values++
	}
	switch major {
	case cborBytes, cborText:
		if n == untilEnd {
			return c.cborParts(data, n, depth+1, false)
		}
		if n > uint64(len(data)) {
			return nil, false
		}
		return data[n:], true
	case cborTag:
		return c.cbor(data, depth+1)
	case cborArray:
		return c.cborParts(data, n, depth+1, true)
	case cborMap:
		c.Objects++
		if n != untilEnd {
			n = min(n, untilEnd/2-1) * 2
		}
		return c.cborParts(data, n, depth+1, false)
	}
	return data, true
}

// cborParts counts the n parts of an item, or those up to the break if n is untilEnd. list reports
// whether the item is an array.
func (c *Counts) cborParts(data []byte, n uint64, depth int, list bool) (rest []byte, ok bool) {
	parts := 0
	objects := c.Objects
	defer func() { c.close(parts, list && c.Objects == objects) }()
	for ok = true; ok && n > 0; parts++ {
		if n == untilEnd {
			if len(data) > 0 && data[0] == cborBreak {
				return data[1:], true
			}
		} else {
			n--
		}
		if list {
			c.Items++
		}
		data, ok = c.cbor(data, depth)
	}
	return data, ok
}

// cborHead decodes the head of an item: its major type, and its value or length n.
func cborHead(data []byte) (major byte, n uint64, rest []byte, ok bool) {
	if len(data) == 0 {
		return 0, 0, nil, false
	}
	major, info := data[0]>>5, data[0]&0x1f
	data = data[1:]
	switch {
	case info < 24:
		return major, uint64(info), data, true
	case info < 28:
		size := 1 << (info - 24)
		if len(data) < size {
			return 0, 0, nil, false
		}
		for _, b := range data[:size] {
			n = n<<8 | uint64(b)
		}
		return major, n, data[size:], true
	case info == 31 && major >= cborBytes && major <= cborMap:
		return major, untilEnd, data, true
	}
	return 0, 0, nil, false
}
