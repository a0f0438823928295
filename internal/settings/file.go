package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

// fileEntry is the content of one key of the configuration file: its line and the values to which
// the flag is set.
type fileEntry struct {
	line   int
	values []string
}

// readEntries reads and checks the configuration file, and returns its entries by key.
func readEntries(flags []Flag, file File) (map[string]fileEntry, error) {
	if file.Path == "" {
		return nil, nil
	}
	content, err := readBounded(file.Path)
	if errors.Is(err, fs.ErrNotExist) && !file.Required {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	entries, err := parseEntries(flags, content)
	if err != nil {
		return nil, fmt.Errorf("%s%w", file.Path, err)
	}
	return entries, nil
}

// readBounded returns the content of a regular file of at most MaxSize bytes. Other files are an
// error, so it never blocks and never reads without end.
func readBounded(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return nil, err
	}
	if len(content) > MaxSize {
		return nil, fmt.Errorf("%s is larger than %d bytes, the limit of a configuration file", path, MaxSize)
	}
	return content, nil
}

// parseEntries parses the content of a configuration file and checks it against the flags. The text
// of an error starts with a comma or a colon: the caller must prefix it with the file's path.
func parseEntries(flags []Flag, content []byte) (map[string]fileEntry, error) {
	if n := bytes.Count(content, []byte("[")) + bytes.Count(content, []byte("{")); n > 1000 {
		return nil, fmt.Errorf(": %d brackets are more than a configuration can have", n)
	}
	dec := yaml.NewDecoder(bytes.NewReader(content))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf(": %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New(": more than one document: want one")
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return nil, nil
	}
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf(", line %d: want lines of the form 'key: value'", top.Line)
	}
	known := make(map[string]Flag, len(flags))
	for _, f := range flags {
		known[f.Name] = f
	}
	out := map[string]fileEntry{}
	for i := 0; i < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		f, ok := known[key.Value]
		if key.Kind != yaml.ScalarNode || !ok {
			return nil, fmt.Errorf(", line %d: unknown key %s%s", key.Line, quoteTruncated(key.Value),
				suggestKey(key.Value, flags))
		}
		if first, again := out[f.Name]; again {
			return nil, fmt.Errorf(", line %d: duplicate key %s: it is already set in line %d", key.Line,
				f.Name, first.line)
		}
		values, err := nodeValues(f.Kind, value)
		if err != nil {
			return nil, fmt.Errorf(", line %d: %s: %w", value.Line, f.Name, err)
		}
		out[f.Name] = fileEntry{line: key.Line, values: values}
	}
	return out, nil
}

// nodeValues returns the values that a flag of this kind gets from the YAML node. A node of a type
// that does not match the kind is an error.
func nodeValues(kind Kind, n *yaml.Node) ([]string, error) {
	if kind != List && kind != JoinedList {
		text, err := scalarText(kind, n)
		return []string{text}, err
	}
	if n.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("want a list such as [a, b], not %s", describeNode(n))
	}
	var values []string
	for _, below := range n.Content {
		text, err := scalarText(Text, below)
		if err != nil {
			return nil, err
		}
		if strings.ContainsRune(text, ',') {
			return nil, fmt.Errorf("%s: want a separate list entry for each value", quoteTruncated(text))
		}
		values = append(values, text)
	}
	if kind == JoinedList && len(values) > 0 {
		values = []string{strings.Join(values, ",")}
	}
	return values, nil
}

func scalarText(kind Kind, n *yaml.Node) (string, error) {
	if n.Kind == yaml.ScalarNode {
		switch n.Tag {
		case "!!str", "!!float", "!!timestamp":
			if kind == Text {
				return n.Value, nil
			}
		case "!!int":
			if kind == Text || kind == Integer {
				return n.Value, nil
			}
		case "!!bool":
			if kind == Bool {
				return n.Value, nil
			}
		}
	}
	return "", fmt.Errorf("want %s, not %s", kind, describeNode(n))
}

// describeNode returns the type of a YAML node, or its value if it is a scalar, for an error
// message. A long value is truncated.
func describeNode(n *yaml.Node) string {
	switch n.Kind {
	case yaml.SequenceNode:
		return "a list"
	case yaml.MappingNode:
		return "a mapping"
	case yaml.AliasNode:
		return "an alias"
	}
	switch n.Tag {
	case "!!null":
		return "nothing (leave the key out to use the default)"
	case "!!str":
		return "the text " + quoteTruncated(n.Value)
	case "!!bool":
		return n.Value + " (in quotes it is text)"
	}
	return quoteTruncated(n.Value)
}

// quoteTruncated returns a text in quotes, truncated to 64 bytes.
func quoteTruncated(text string) string {
	if len(text) > 64 {
		return fmt.Sprintf("%.64q...", text)
	}
	return fmt.Sprintf("%q", text)
}

// suggestKey returns the end of an error message about an unknown key. It names the most similar
// flag if one is similar enough, and otherwise refers to --help. For a key of more than 64 bytes it
// returns "".
func suggestKey(key string, flags []Flag) string {
	best, least := "", 4
	if len(key) > 64 {
		return ""
	}
	for _, f := range flags {
		if d := editDistance(strings.ToLower(strings.ReplaceAll(key, "_", "-")), f.Name); d < least {
			best, least = f.Name, d
		}
	}
	if best == "" {
		return ": --help lists the keys"
	}
	return ": the nearest is " + best
}

// editDistance returns the Levenshtein distance of two texts.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := corner
			if a[i] != b[j] {
				change++
			}
			corner = row[j+1]
			row[j+1] = min(change, corner+1, row[j]+1)
		}
	}
	return row[len(b)]
}
