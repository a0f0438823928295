package conformance

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
)

// The columns are those of kubectl get, each row has a cell for each, and metadata alone is what the object has.
func isShown(t *testing.T, u *kindUnderTest) {
	o := u.make(t, labelled("seen", "table"))
	one := u.want(t, 200, "GET", u.path(o.name()), nil, "Accept", asTable).object()
	many := u.want(t, 200, "GET", with(u.path(), "labelSelector=seen%3Dtable"), nil, "Accept", asTable).object()
	for _, table := range []object{one, many} {
		var columns []string
		list, _ := table.at("columnDefinitions").([]any)
		for _, c := range list {
			column := object(c.(map[string]any))
			name := column.text("name")
			if column.at("priority") != 0.0 {
				name = "(" + name + ")"
			}
			columns = append(columns, name)
			if column.text("type") == "" || column.text("description") == "" {
				t.Errorf("column %v lacks something", column)
			}
		}
		if got := strings.Join(columns, ", "); got != u.row.Columns {
			t.Errorf("columns: %s\nwant:    %s", got, u.row.Columns)
		}
		lines, _ := table.at("rows").([]any)
		if table.text("kind") != "Table" || table.version() == "" || len(lines) != 1 {
			t.Fatalf("%v", table)
		}
		line := object(lines[0].(map[string]any))
		cells, _ := line.at("cells").([]any)
		if len(cells) != len(columns) || !slices.Contains(cells, any(o.name())) && u.Resource != "events" {
			t.Errorf("cells %v", cells)
		}
		if line.text("object", "kind") != "PartialObjectMetadata" || line.text("object", "metadata", "uid") != o.uid() {
			t.Errorf("the row's object is %v", line["object"])
		}
	}
	partial := u.want(t, 200, "GET", u.path(o.name()), nil, "Accept", asPartial).object()
	if partial.text("kind") != "PartialObjectMetadata" || !reflect.DeepEqual(partial.metadata(), o.metadata()) ||
		len(partial) != 3 {
		t.Errorf("%v\nwant the metadata of %v", partial, o)
	}
	partials := u.want(t, 200, "GET", with(u.path(), "labelSelector=seen%3Dtable"), nil, "Accept", asPartials).object()
	if partials.text("kind") != "PartialObjectMetadataList" || !slices.Equal(partials.names(), []string{o.name()}) {
		t.Errorf("%v", partials)
	}
}

// plain reads an answer in a media type as JSON has it.
func (u *kindUnderTest) plain(t *testing.T, media string, a answer) object {
	t.Helper()
	var data []byte
	var err error
	switch media {
	case "application/cbor":
		var v any
		if err = direct.Unmarshal(a.body, &v); err == nil {
			data, err = json.Marshal(v)
		}
	case "application/yaml":
		data, err = yaml.YAMLToJSON(a.body)
	case protobuf:
		var o runtime.Object
		if o, _, err = api.Codecs(u.scheme).UniversalDeserializer().Decode(a.body, nil, nil); err == nil {
			data, err = json.Marshal(o)
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", media, err)
	}
	return answer{body: data}.object()
}

// An object and a list say the same in every media type, and what was read in one can be written in it.
func saysTheSame(t *testing.T, u *kindUnderTest) {
	o := u.make(t, labelled("seen", "media"))
	for _, path := range []string{u.path(o.name()), with(u.path(), "labelSelector=seen%3Dmedia")} {
		want := u.want(t, 200, "GET", path, nil)
		for _, media := range []string{"application/yaml", "application/cbor", protobuf} {
			a := u.send(t, "GET", path, nil, "Accept", media)
			if media == protobuf && !u.Type.Ops.Protobuf {
				if a.code != 406 {
					t.Errorf("%s: %d %s", media, a.code, a.body)
				}
				continue
			}
			if a.code != 200 || a.header.Get(contentType) != media {
				t.Errorf("%s: %d %s", media, a.code, a.header.Get(contentType))
				continue
			}
			expected := want.object()
			if media == protobuf { // typed: fields that are never left out are there
				expected = u.typed(t, want.body)
			}
			got := u.plain(t, media, a)
			for _, o := range []object{got, expected} {
				if o.items() == nil {
					continue
				}
				delete(o.metadata(), "resourceVersion") // others write meanwhile
				for _, item := range o.items() {        // which the list says of all of them
					delete(item.(map[string]any), "apiVersion")
					delete(item.(map[string]any), "kind")
				}
			}
			if !reflect.DeepEqual(got, expected) {
				t.Errorf("%s %s says\n%v\nand JSON\n%v", path, media, got, expected)
			}
			if strings.Contains(path, "?") {
				continue
			}
			put := u.want(t, 200, "PUT", path, string(a.body), contentType, media)
			if put.object().version() != o.version() {
				t.Errorf("%s: writing what was read changes %s", media, put.body)
			}
		}
	}
}

// typed is JSON as it comes out of the Go type.
func (u *kindUnderTest) typed(t *testing.T, body []byte) object {
	t.Helper()
	o, _, err := api.Codecs(u.scheme).UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return answer{body: data}.object()
}
