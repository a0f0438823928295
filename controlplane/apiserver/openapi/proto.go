package openapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/google/gnostic-models/compiler"
	openapi_v2 "github.com/google/gnostic-models/openapiv2"
	openapi_v3 "github.com/google/gnostic-models/openapiv3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// A document in protobuf consists of pieces, too. A message with repeated fields is the
// concatenation of the messages of its parts. The length prefixes are computed from the sizes of
// the compressed pieces.

// Field numbers of the sections in the protobuf messages of gnostic.
const (
	v2Paths, v2Definitions, v2Parameters = 8, 9, 10
	v3Paths, v3Components, v3Schemas     = 4, 5, 1
)

// inProto converts the description of a topic from JSON to protobuf.
func (s *Spec) inProto(plain *description, v3 bool) (*description, error) {
	var x sections
	x.addDescription(plain)
	x, err := s.sectionsInProto(&x, v3)
	if err != nil {
		return nil, err
	}
	out := &description{types: plain.types}
	if len(x.definitions) > 0 {
		out.definitions = x.definitions[0]
	}
	if len(x.paths) > 0 {
		out.paths = x.paths[0]
	}
	return out, nil
}

// sectionsInProto converts sections from JSON to protobuf. Each non-empty section becomes one
// piece.
func (s *Spec) sectionsInProto(plain *sections, v3 bool) (out sections, err error) {
	var doc bytes.Buffer
	if err := plain.asJSONDocument(v3, s.info).writePlain(&doc); err != nil {
		return out, err
	}
	definitions, paths, parameters, err := protoSections(doc.Bytes(), v3)
	if err != nil {
		return out, err
	}
	for _, one := range []struct {
		data []byte
		into *[]*piece
	}{{definitions, &out.definitions}, {paths, &out.paths}, {parameters, &out.parameters}} {
		if len(one.data) == 0 {
			continue
		}
		p, err := s.packCounted(one.data)
		if err != nil {
			return out, err
		}
		*one.into = []*piece{p}
	}
	return out, nil
}

// protoDocument converts a JSON document to a protobuf message.
func protoDocument(doc []byte, v3 bool) (proto.Message, error) {
	root, err := parseYAMLNodes(json.NewDecoder(bytes.NewReader(doc)))
	if err != nil {
		return nil, err
	}
	in := compiler.NewContextWithExtensions("$root", root, nil, nil)
	if v3 {
		return openapi_v3.NewDocument(root, in)
	}
	return openapi_v2.NewDocument(root, in)
}

// protoSections returns the sections of a JSON document, each as an encoded protobuf message. The
// encoding is deterministic, so that a document has the same hash on all replicas.
func protoSections(doc []byte, v3 bool) (definitions, paths, parameters []byte, err error) {
	message, err := protoDocument(doc, v3)
	if err != nil {
		return nil, nil, nil, err
	}
	out := proto.MarshalOptions{Deterministic: true}
	var messages []proto.Message
	switch d := message.(type) {
	case *openapi_v3.Document:
		messages = []proto.Message{d.GetComponents().GetSchemas(), d.GetPaths()}
	case *openapi_v2.Document:
		messages = []proto.Message{d.GetDefinitions(), d.GetPaths(), d.GetParameters()}
	}
	var parts [3][]byte
	for i, m := range messages {
		if parts[i], err = out.Marshal(m); err != nil {
			return nil, nil, nil, err
		}
	}
	return parts[0], parts[1], parts[2], nil
}

// inProto returns the protobuf document that consists of these sections, which must be in protobuf
// already. It starts with the message of a document that has only the info section; protobuf merges
// fields that occur twice.
func (x *sections) inProto(v3 bool, info []byte) (sequence, error) {
	var head bytes.Buffer
	if err := (&sections{}).asJSONDocument(v3, info).writePlain(&head); err != nil {
		return nil, err
	}
	message, err := protoDocument(head.Bytes(), v3)
	if err != nil {
		return nil, err
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
	if err != nil {
		return nil, err
	}
	out := sequence{plainPiece(string(data))}
	if v3 {
		out = append(out, lengthDelimited(v3Paths, x.paths)...)
		return append(out, lengthDelimited(v3Components, lengthDelimited(v3Schemas, x.definitions))...), nil
	}
	out = append(append(out, lengthDelimited(v2Paths, x.paths)...), lengthDelimited(v2Definitions, x.definitions)...)
	if len(x.parameters) > 0 {
		out = append(out, lengthDelimited(v2Parameters, x.parameters)...)
	}
	return out, nil
}

// lengthDelimited returns a length-delimited field that contains the pieces.
func lengthDelimited(number protowire.Number, content sequence) sequence {
	tag := protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.BytesType), uint64(content.plainSize()))
	return append(sequence{plainPiece(string(tag))}, content...)
}

// parseYAMLNodes parses JSON into the YAML nodes from which gnostic builds its messages. The YAML
// parser of gnostic would take several times as long.
func parseYAMLNodes(decoder *json.Decoder) (*yaml.Node, error) {
	decoder.UseNumber()
	root, err := parseYAMLNode(decoder)
	if err != nil {
		return nil, fmt.Errorf("decoding an OpenAPI document: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("unexpected data after an OpenAPI document: %w", err)
	}
	return root, nil
}

func parseYAMLNode(decoder *json.Decoder) (*yaml.Node, error) {
	token, err := decoder.Token()
	if err != nil {
		return nil, err
	}
	scalar := func(tag, value string) (*yaml.Node, error) {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}, nil
	}
	switch v := token.(type) {
	case string:
		return scalar("!!str", v)
	case bool:
		return scalar("!!bool", fmt.Sprint(v))
	case json.Number:
		if _, err := v.Int64(); err == nil {
			return scalar("!!int", v.String())
		}
		return scalar("!!float", v.String())
	case nil:
		return scalar("!!null", "null")
	}
	out := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	if token == json.Delim('[') {
		out.Kind, out.Tag = yaml.SequenceNode, "!!seq"
	}
	for decoder.More() { // keys of members are tokens, too
		child, err := parseYAMLNode(decoder)
		if err != nil {
			return nil, err
		}
		out.Content = append(out.Content, child)
	}
	_, err = decoder.Token()
	return out, err
}
