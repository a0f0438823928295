package wire

// Message is the body of a frame. Its method lists its fields for encoding and decoding.
type Message interface {
	// visitFields calls a method of c for every field. Fields of version 0 are visited in the order
	// of their encoding.
	visitFields(c *coder)
}

// Marshal encodes message in the format of a protocol version.
func Marshal(version int64, message Message) []byte {
	c := coder{version: version}
	message.visitFields(&c)
	return c.buffer
}

// Unmarshal decodes data, in the format of a protocol version, into message, which must be zero. It
// returns ErrMalformed for data that no release can have written. Unknown fields are skipped;
// missing fields stay zero.
func Unmarshal(version int64, data []byte, message Message) error {
	c := coder{version: version, decoding: true, buffer: data}
	if version == 0 {
		message.visitFields(&c)
		if c.malformed || len(c.buffer) != 0 {
			return ErrMalformed
		}
		return nil
	}
	for len(c.buffer) > 0 {
		if c.nextField(); !c.malformed && c.tag != 0 {
			message.visitFields(&c)
		}
		if c.malformed {
			return ErrMalformed
		}
	}
	return nil
}

// The wire types of fields, numbered as in protocol buffers.
const (
	typeNumber = 0
	typeFixed8 = 1
	typeBytes  = 2
	typeFixed4 = 5
)

// coder encodes or decodes one message. The message calls a method of the coder for each of its
// fields. In version 0, each call writes or reads the field. In later versions, an encoding call
// writes the field with its tag, unless the field is zero. A decoding call reads the current field
// if it has the same tag.
type coder struct {
	version   int64
	decoding  bool
	buffer    []byte // encoded so far, or still to be decoded
	malformed bool

	tag    uint64 // decoding: tag of the current field; 0 = skip it
	kind   uint64
	number uint64
	data   []byte
}

// nextField reads the tag, the type and the value of the next field from the input.
func (c *coder) nextField() {
	key := c.takeUvarint()
	c.tag, c.kind = key>>3, key&7
	if c.tag == 0 {
		c.malformed = true
	}
	switch c.kind {
	case typeNumber:
		c.number = c.takeUvarint()
	case typeBytes:
		c.data = c.takeBytes(c.takeUvarint())
	case typeFixed8:
		c.takeBytes(8)
		c.tag = 0
	case typeFixed4:
		c.takeBytes(4)
		c.tag = 0
	default:
		c.malformed = true
	}
}

// matchesTag reports whether the current field has this tag. If the tag matches but the wire type
// kind does not, it marks the message as malformed.
func (c *coder) matchesTag(tag int, kind uint64) bool {
	if c.tag != uint64(tag) {
		return false
	}
	if c.kind != kind {
		c.malformed = true
		return false
	}
	return true
}

func (c *coder) appendKey(tag int, kind uint64) {
	c.buffer = appendUvarint(c.buffer, uint64(tag)<<3|kind)
}

// numberField encodes or decodes a signed number, in zigzag encoding.
func (c *coder) numberField(tag int, value *int64) {
	switch {
	case c.version == 0 && c.decoding:
		*value = decodeZigzag(c.takeUvarint())
	case c.version == 0:
		c.buffer = appendUvarint(c.buffer, encodeZigzag(*value))
	case c.decoding:
		if c.matchesTag(tag, typeNumber) {
			*value = decodeZigzag(c.number)
		}
	case *value != 0:
		c.appendKey(tag, typeNumber)
		c.buffer = appendUvarint(c.buffer, encodeZigzag(*value))
	}
}

// bitsField encodes or decodes an unsigned number. Version 0 has no such fields.
func (c *coder) bitsField(tag int, value *uint64) {
	if c.decoding {
		if c.matchesTag(tag, typeNumber) {
			*value = c.number
		}
	} else if *value != 0 {
		c.appendKey(tag, typeNumber)
		c.buffer = appendUvarint(c.buffer, *value)
	}
}

func (c *coder) flagField(tag int, value *bool) {
	switch {
	case c.version == 0:
		var v int64
		if *value {
			v = 1
		}
		if c.numberField(tag, &v); v != 0 && v != 1 {
			c.malformed = true
		}
		*value = v == 1
	case c.decoding:
		if c.matchesTag(tag, typeNumber) {
			*value = c.number != 0
		}
	case *value:
		c.appendKey(tag, typeNumber)
		c.buffer = append(c.buffer, 1)
	}
}

func (c *coder) stringField(tag int, value *string) {
	switch {
	case c.version == 0 && c.decoding:
		*value = string(c.takeBytes(c.takeUvarint()))
	case c.version == 0:
		c.appendString(*value)
	case c.decoding:
		if c.matchesTag(tag, typeBytes) {
			*value = string(c.data)
		}
	case *value != "":
		c.appendKey(tag, typeBytes)
		c.appendString(*value)
	}
}

func (c *coder) stringsField(tag int, values *[]string) {
	n := c.countElements(tag, len(*values))
	switch {
	case c.version == 0 && c.decoding:
		for range n {
			*values = append(*values, string(c.takeBytes(c.takeUvarint())))
		}
	case c.version == 0:
		for _, s := range *values {
			c.appendString(s)
		}
	case c.decoding:
		if n > 0 {
			*values = append(*values, string(c.data))
		}
	default:
		for _, s := range *values {
			c.appendKey(tag, typeBytes)
			c.appendString(s)
		}
	}
}

// countElements returns how many list elements the caller must encode or decode now. In version 0,
// these are all elements, and countElements also encodes or decodes their count. In later versions,
// encoding also handles all elements. Decoding handles one element if the current field has this
// tag, and otherwise none.
func (c *coder) countElements(tag int, length int) int64 {
	n := int64(length)
	switch {
	case c.version == 0:
		c.numberField(tag, &n)
		// Each element takes at least one byte, so a larger count is invalid.
		if c.decoding && (n < 0 || n > int64(len(c.buffer))) {
			c.malformed, c.buffer = true, nil
			return 0
		}
	case c.decoding:
		if n = 0; c.matchesTag(tag, typeBytes) {
			n = 1
		}
	}
	return n
}

// messageField encodes or decodes an embedded message. In version 0, its fields are inlined into
// the outer message.
func (c *coder) messageField(tag int, m Message) {
	switch {
	case c.version == 0:
		m.visitFields(c)
	case c.decoding:
		if c.matchesTag(tag, typeBytes) && Unmarshal(c.version, c.data, m) != nil {
			c.malformed = true
		}
	default:
		c.appendKey(tag, typeBytes)
		c.appendString(string(Marshal(c.version, m)))
	}
}

func (c *coder) appendString(text string) {
	c.buffer = appendUvarint(c.buffer, uint64(len(text)))
	c.buffer = append(c.buffer, text...)
}

// takeBytes removes the next count bytes from the input and returns them.
func (c *coder) takeBytes(count uint64) []byte {
	if count > uint64(len(c.buffer)) {
		c.malformed, c.buffer = true, nil
		return nil
	}
	b := c.buffer[:count]
	c.buffer = c.buffer[count:]
	return b
}

func (c *coder) takeUvarint() uint64 {
	var v uint64
	for i, x := range c.buffer {
		if i == 9 && x > 1 {
			break // more than 64 bits
		}
		v |= uint64(x&0x7f) << (7 * i)
		if x < 0x80 {
			c.buffer = c.buffer[i+1:]
			return v
		}
	}
	c.malformed, c.buffer = true, nil
	return 0
}

func encodeZigzag(value int64) uint64 { return uint64(value)<<1 ^ uint64(value>>63) }
func decodeZigzag(value uint64) int64 { return int64(value>>1) ^ -int64(value&1) }

func appendUvarint(data []byte, value uint64) []byte {
	for value >= 0x80 {
		data = append(data, byte(value)|0x80)
		value >>= 7
	}
	return append(data, byte(value))
}

func appendUint32(data []byte, value uint32) []byte {
	return append(data, byte(value), byte(value>>8), byte(value>>16), byte(value>>24))
}

func decodeUint32(data []byte) uint32 {
	return uint32(data[0]) | uint32(data[1])<<8 | uint32(data[2])<<16 | uint32(data[3])<<24
}
