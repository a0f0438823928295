package decodelimits

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
)

// FromCBOR converts CBOR to JSON, within the limits of this package. It rejects everything that
// Kubernetes' decoder rejects, such as duplicate keys. Floating-point numbers keep their fraction,
// even if it is 0.
func FromCBOR(data []byte) ([]byte, error) {
	if err := CheckCBOR(data); err != nil {
		return nil, err
	}
	var doc any
	if err := direct.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	out, err := json.Marshal(formatFractions(doc))
	if err != nil {
		return nil, err
	}
	if len(out) > MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes after expansion, at most %d are read", ErrTooMuch, len(out), MaxBytes)
	}
	return out, nil
}

// formatFractions replaces each floating-point number with a json.Number that has a fraction or an
// exponent, such as 1.0. It modifies maps and lists in place, and returns v or its replacement.
func formatFractions(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			v[key] = formatFractions(value)
		}
	case []any:
		for i := range v {
			v[i] = formatFractions(v[i])
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

// CheckCBOR returns an error for a CBOR data item that exceeds the limits of this package. It does
// not report malformed data, which the decoder rejects.
func CheckCBOR(data []byte) error {
	var c Counts
	c.countCBOR(data, 0)
	return c.CheckLimits(nil)
}

// The CBOR major types of items with a length or nested items, and the marks of an indefinite
// length.
const (
	cborBytes        = 2
	cborText         = 3
	cborArray        = 4
	cborMap          = 5
	cborTag          = 6
	indefiniteLength = ^uint64(0)
	cborBreak        = 0xff
)

// countCBOR adds the contents of one data item to the counts and returns the data after the item.
// ok is false if the data is malformed or exceeds a limit, so that counting stops.
func (c *Counts) countCBOR(data []byte, depth int) (rest []byte, ok bool) {
	if depth > MaxDepth {
		c.deep = true
	}
	if c.deep || c.Values > MaxValues {
		return nil, false
	}
	major, n, data, ok := decodeCBORHead(data)
	if !ok {
		return nil, false
	}
	if major != cborTag {
		c.Values++
	}
	switch major {
	case cborBytes, cborText:
		if n == indefiniteLength {
			return c.countCBORParts(data, n, depth+1, false)
		}
		if n > uint64(len(data)) {
			return nil, false
		}
		return data[n:], true
	case cborTag:
		return c.countCBOR(data, depth+1)
	case cborArray:
		return c.countCBORParts(data, n, depth+1, true)
	case cborMap:
		c.Objects++
		if n != indefiniteLength {
			n = min(n, indefiniteLength/2-1) * 2
		}
		return c.countCBORParts(data, n, depth+1, false)
	}
	return data, true
}

// countCBORParts adds the given number of parts of an item (array items, or keys and values) to the
// counts. If count is indefiniteLength, it counts the parts up to the break. isArray reports
// whether the item is an array.
func (c *Counts) countCBORParts(data []byte, count uint64, depth int, isArray bool) (rest []byte, ok bool) {
	parts := 0
	objects := c.Objects
	defer func() { c.endContainer(parts, isArray && c.Objects == objects) }()
	for ok = true; ok && count > 0; parts++ {
		if count == indefiniteLength {
			if len(data) > 0 && data[0] == cborBreak {
				return data[1:], true
			}
		} else {
			count--
		}
		if isArray {
			c.Items++
		}
		data, ok = c.countCBOR(data, depth)
	}
	return data, ok
}

// decodeCBORHead decodes the head of a CBOR data item: its major type, and n, its value or length.
// rest is the data after the head. ok is false if the head is malformed.
func decodeCBORHead(data []byte) (major byte, n uint64, rest []byte, ok bool) {
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
		return major, indefiniteLength, data, true
	}
	return 0, 0, nil, false
}
