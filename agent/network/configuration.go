package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
)

// configurationLimit is the maximum size of a CNI configuration file, in bytes.
const configurationLimit = 1 << 20

// loadConfiguration reads and validates the CNI configuration of a third-party network from the
// file path. Its errors name the file and the line.
func loadConfiguration(path string) (*libcni.NetworkConfigList, error) {
	raw, err := readLimited(path)
	if err != nil {
		return nil, fmt.Errorf("network configuration %s: %w", path, err)
	}
	at, err := findConfigurationError(raw, filepath.Ext(path) == ".conflist")
	if errors.Is(err, errNoPlugins) {
		if list, err := parseConfiguration(path, raw); err == nil {
			return list, nil // the plugins are in other files
		}
	}
	if err != nil {
		return nil,
			fmt.Errorf("network configuration %s, line %d: %w: correct the file, or remove it to use "+
				"Keelson's own network",
				path, 1+bytes.Count(raw[:min(at, len(raw))], []byte("\n")), err)
	}
	list, err := parseConfiguration(path, raw)
	if err != nil {
		return nil, fmt.Errorf("network configuration %s, line 1: %w", path, err)
	}
	return list, nil
}

func parseConfiguration(path string, raw []byte) (*libcni.NetworkConfigList, error) {
	if filepath.Ext(path) != ".conflist" {
		one, err := libcni.ConfFromBytes(raw)
		if err != nil {
			return nil, err
		}
		return libcni.ConfListFromConf(one)
	}
	list, err := libcni.NetworkConfFromBytes(raw)
	if err != nil || list.LoadOnlyInlinedPlugins {
		return list, err
	}
	// Plugins in separate files are in a directory beside the file, which has the network's name.
	more, err := libcni.NetworkPluginConfsFromFiles(filepath.Dir(path), list.Name)
	if err != nil {
		return nil, err
	}
	list.Plugins = append(list.Plugins, more...)
	if len(list.Plugins) == 0 {
		return nil, errNoPlugins
	}
	return list, nil
}

func readLimited(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, configurationLimit+1))
	if err == nil && len(raw) > configurationLimit {
		err = fmt.Errorf("the file exceeds %d bytes", configurationLimit)
	}
	return raw, err
}

var errNoPlugins = errors.New("it lists no plugins")

// findConfigurationError returns the error for which libcni would reject the configuration raw, and
// the error's byte offset in raw. isList is true for a configuration list (.conflist), and false
// for a single plugin's configuration.
func findConfigurationError(raw []byte, isList bool) (offset int, err error) {
	var top map[string]json.RawMessage
	if err := json.Unmarshal(raw, &top); err != nil {
		return errorOffset(err, len(raw)), err
	}
	where := func(part []byte) int { return max(0, bytes.Index(raw, part)) }
	text := func(in map[string]json.RawMessage, key string) (string, int, error) {
		value, ok := in[key]
		if !ok {
			return "", 0, nil
		}
		var s string
		if err := json.Unmarshal(value, &s); err != nil {
			return "", where(value), fmt.Errorf("%s: want a string", key)
		}
		return s, where(value), nil
	}
	for _, key := range []string{"name", "cniVersion"} {
		s, offset, err := text(top, key)
		if err != nil {
			return offset, err
		}
		if key == "name" && s == "" {
			return offset, errors.New("it has no name")
		}
		if known := version.All.SupportedVersions(); key == "cniVersion" && s != "" && !slices.Contains(known, s) {
			return offset, fmt.Errorf("cniVersion %q is not supported: want one of %s", s, strings.Join(known, ", "))
		}
	}
	if !isList {
		return checkPluginType(raw, 0)
	}
	value, ok := top["plugins"]
	if !ok {
		return 0, errNoPlugins
	}
	var plugins []json.RawMessage
	if err := json.Unmarshal(value, &plugins); err != nil {
		return where(value), errors.New("plugins: want a list")
	}
	if len(plugins) == 0 {
		return where(value), errNoPlugins
	}
	from := where(value)
	for _, p := range plugins {
		i := bytes.Index(raw[from:], p)
		from += max(0, i)
		if offset, err := checkPluginType(p, from); err != nil {
			return offset, err
		}
		from += len(p)
	}
	return 0, nil
}

// checkPluginType returns an error if a plugin's JSON has no valid type. pluginOffset is the byte
// offset of the plugin in the configuration file. The returned offset is that of the error.
func checkPluginType(plugin []byte, pluginOffset int) (int, error) {
	var p struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(plugin, &p); err != nil {
		return pluginOffset, fmt.Errorf("a plugin: %w", err)
	}
	if p.Type == "" {
		return pluginOffset, errors.New("a plugin has no type")
	}
	if filepath.Base(p.Type) != p.Type {
		return pluginOffset, fmt.Errorf("type %q of a plugin: want the name of a program without a directory", p.Type)
	}
	return 0, nil
}

// errorOffset returns the byte offset of a JSON syntax or type error. For other errors it returns
// end.
func errorOffset(err error, end int) int {
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return max(0, int(syntax.Offset)-1)
	}
	if form, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return max(0, int(form.Offset)-1)
	}
	return end
}
