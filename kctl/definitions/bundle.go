// Package definitions contains CustomResourceDefinitions of other projects, such as Gateway API,
// and installs them into a cluster on request. Each project has a directory with its license and
// its unchanged definitions. Tests compare each directory with the Go module that go.mod pins. kctl
// contains the definitions, so that the control plane serves their kinds only after a user installs
// them. Every served kind costs memory on every replica. Helm charts that detect Gateway API would
// create other objects in clusters in which no user requested it.
package definitions

import (
	"bytes"
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"io"
	"maps"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

//go:embed gateway snapshot
var folders embed.FS

// mostUnpacked is the maximum size of the unpacked definitions of a bundle, in bytes of YAML.
const mostUnpacked = 16 << 20

// releaseOfOurs is the annotation in which kctl records the release of a definition, if the project
// has no annotation for that.
const releaseOfOurs = "keelson.dev/release"

// Bundle describes the CustomResourceDefinitions of one release of a project.
type Bundle struct {
	Name    string // name and folder of the bundle, such as "gateway"
	Module  string // Go module from which the definitions are copied
	Release string // release of the module, such as "v1.6.3"
	// Files are the paths of the definitions within the module, in the order of installation.
	Files []string
	// ReleaseKey and ChannelKey are the annotations in which the project's definitions record their
	// release and their channel (standard or experimental). Either is empty if the project has no
	// such annotation.
	ReleaseKey, ChannelKey string
	// Notes are annotations that Definitions adds to each definition. Keelson's controllers read
	// them.
	Notes map[string]string
}

// Gateway is the bundle of the Gateway API kinds of the standard channel that Keelson's controller
// supports.
var Gateway = Bundle{
	Name: "gateway", Module: "sigs.k8s.io/gateway-api", Release: "v1.6.3",
	Files: []string{
		"config/crd/standard/gateway.networking.k8s.io_gatewayclasses.yaml",
		"config/crd/standard/gateway.networking.k8s.io_gateways.yaml",
		"config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
		"config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml",
		"config/crd/standard/gateway.networking.k8s.io_referencegrants.yaml",
	},
	ReleaseKey: "gateway.networking.k8s.io/bundle-version", ChannelKey: "gateway.networking.k8s.io/channel",
}

// Snapshot is the bundle of the kinds for snapshots of volumes and of volume groups. The control
// plane serves these kinds only if the annotation in Notes is set. Users with another snapshot
// controller install definitions without that annotation.
var Snapshot = Bundle{
	Name: "snapshot", Module: "github.com/kubernetes-csi/external-snapshotter/client/v8", Release: "v8.7.0",
	Files: []string{
		"config/crd/snapshot.storage.k8s.io_volumesnapshotclasses.yaml",
		"config/crd/snapshot.storage.k8s.io_volumesnapshotcontents.yaml",
		"config/crd/snapshot.storage.k8s.io_volumesnapshots.yaml",
		"config/crd/groupsnapshot.storage.k8s.io_volumegroupsnapshotclasses.yaml",
		"config/crd/groupsnapshot.storage.k8s.io_volumegroupsnapshotcontents.yaml",
		"config/crd/groupsnapshot.storage.k8s.io_volumegroupsnapshots.yaml",
	},
	Notes: map[string]string{"keelson.dev/served-by": "control-plane"},
}

// All contains every bundle.
var All = []Bundle{Gateway, Snapshot}

// packedPath returns the path, in the embedded file system, of the definitions compressed with
// gzip.
func (b Bundle) packedPath() string { return b.Name + "/definitions.yaml.gz" }

// YAML returns the unchanged definitions of the project as a stream of YAML documents.
func (b Bundle) YAML() ([]byte, error) {
	data, err := folders.ReadFile(b.packedPath())
	if err != nil {
		return nil, fmt.Errorf("reading the definitions of %s: %w", b.Name, err)
	}
	return unpackDefinitions(data)
}

func unpackDefinitions(data []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("unpacking definitions: %w", err)
	}
	out, err := io.ReadAll(io.LimitReader(z, mostUnpacked+1))
	if err != nil {
		return nil, fmt.Errorf("unpacking definitions: %w", err)
	}
	if len(out) > mostUnpacked {
		return nil, fmt.Errorf("unpacking definitions: they are larger than %d bytes", mostUnpacked)
	}
	return out, nil
}

// Definitions returns the CustomResourceDefinitions to install. Each has an annotation with its
// release and the annotations in b.Notes, and has no status.
func (b Bundle) Definitions() ([]*unstructured.Unstructured, error) {
	text, err := b.YAML()
	if err != nil {
		return nil, err
	}
	var out []*unstructured.Unstructured
	for d := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := d.Decode(&u.Object); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("reading the definitions of %s: %w", b.Name, err)
		}
		if len(u.Object) == 0 {
			continue
		}
		unstructured.RemoveNestedField(u.Object, "status")
		notes := u.GetAnnotations()
		if notes == nil {
			notes = map[string]string{}
		}
		if notes[b.releaseKey()] == "" {
			notes[b.releaseKey()] = b.Release
		}
		maps.Copy(notes, b.Notes)
		u.SetAnnotations(notes)
		out = append(out, u)
	}
}

func (b Bundle) releaseKey() string {
	if b.ReleaseKey == "" {
		return releaseOfOurs
	}
	return b.ReleaseKey
}
