package decodelimits

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
)

// FromCBOR turns CBOR into JSON within the limits. What it refuses is what Kubernetes' decoder refuses: keys that are
// there twice, among others. A number with a fraction stays one, also when the fraction is 0.
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

// fractions replaces numbers that JSON would write without their fraction.
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

// CheckCBOR refuses a data item beyond the limits. What is malformed is left to the decoder.
func CheckCBOR(data []byte) error {
	var c Counts
	c.cbor(data, 0)
	return c.Check(nil)
}

// The major types of CBOR that hold something, and the length that says "until the break".
const (
	cborBytes = 2
	cborText  = 3
	cborArray = 4
	cborMap   = 5
	cborTag   = 6
	untilEnd  = ^uint64(0)
	cborBreak = 0xff
)

// cbor counts one item and returns what follows it; ok is false when nothing more is to be looked at.
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

// cborParts counts n parts of an item, or those up to the break.
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

// cborHead reads the head of an item: what it is, and its value or length.
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
