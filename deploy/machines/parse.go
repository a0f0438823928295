package machines

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Limits of the content of a cluster file.
const (
	maxFile  = 1 << 20 // maximum size of the file in bytes
	maxHosts = 1000
	maxText  = 4096 // maximum size of one value in bytes
)

var (
	hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	sshName  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$`)
	flagName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,63}$`)
	// initValue matches the values that install.sh accepts for a flag of 'keelson-controlplane
	// init'.
	initValue = regexp.MustCompile(`^[]A-Za-z0-9._:/=,@+[-]{1,512}$`)
	labelKey  = regexp.MustCompile(`^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,` +
		`61}[A-Za-z0-9])?$`)
	labelText = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$`)
	taintForm = regexp.MustCompile(`^([^=:]+)(?:=([^=:]*))?:(NoSchedule|PreferNoSchedule|NoExecute)$`)
)

// derivedSettings are daemon settings that a cluster file must not contain, because kctl or the
// release sets them. The map contains, by setting, a text for the user that explains how the
// setting is determined.
var derivedSettings = map[string]string{
	"standby": "the host's roles", "name": "the host's name", "node-name": "the host's name",
	"advertise-address": "the host's address", "node-ip": "the host's address",
	"server": "the hosts with a replica", "token": "tokens that are made when a machine joins",
	"token-file":  "tokens that are made when a machine joins",
	"node-labels": "the host's labels", "taints": "the host's taints", "cluster-name": "the key name",
	"data-dir":    "the scripts of a release, which know its place",
	"state-dir":   "the scripts of a release, which know its place",
	"run-dir":     "the scripts of a release, which know its place",
	"cgroup-root": "the units of a release, which know its place", "config": "the units of a release",
}

// Parse parses the content of a cluster file. Relative paths in it are relative to folder, and ~
// stands for home. Errors start with punctuation such as ", line 3: ", because the caller puts the
// name of the file before them.
func Parse(raw []byte, folder, home string) (Cluster, error) {
	if len(raw) > maxFile {
		return Cluster{}, fmt.Errorf(": %d bytes: a cluster file has at most %d", len(raw), maxFile)
	}
	// The YAML parser takes a long time for a short text with many nested brackets.
	if n := bytes.Count(raw, []byte("[")) + bytes.Count(raw, []byte("{")); n > 10*maxHosts {
		return Cluster{}, fmt.Errorf(": %d brackets: no cluster file has so many", n)
	}
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return Cluster{}, errors.New(" is empty: want apiVersion, kind and hosts")
	case err != nil:
		return Cluster{}, fmt.Errorf(": %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return Cluster{}, errors.New(": there is more than one document: want one")
	}
	p := fileParser{lines: map[string]int{}}
	if err := p.parseFile(doc.Content[0]); err != nil {
		return Cluster{}, err
	}
	for i := range p.hosts {
		p.cluster.Hosts = append(p.cluster.Hosts, p.withDefaults(p.hosts[i]))
	}
	if err := p.cluster.applyDefaults(folder, home, p.lines); err != nil {
		return Cluster{}, err
	}
	return p.cluster, nil
}

// fileParser holds the values of a cluster file while it is parsed. Defaults are applied to the
// hosts after that, because the keys with defaults may follow the key hosts.
type fileParser struct {
	cluster             Cluster
	ssh                 SSH
	controlplane, agent Settings
	version, kind       string
	hosts               []Host
	lines               map[string]int // line of each host in the cluster file, by name
}

// withDefaults returns the host h with values for its omitted settings and SSH keys. They come from
// the keys ssh, controlplane, and agent of the whole cluster file. If these keys do not contain
// them, the SSH user is root and the port is 22.
func (p *fileParser) withDefaults(h Host) Host {
	h.ControlPlane, h.Agent = p.controlplane.overriddenBy(h.ControlPlane), p.agent.overriddenBy(h.Agent)
	s := p.ssh
	s.Address, s.HostKey = h.SSH.Address, h.SSH.HostKey
	for _, f := range []struct{ from, to *string }{{&h.SSH.User, &s.User}, {&h.SSH.Key, &s.Key},
		{&h.SSH.KnownHosts, &s.KnownHosts}} {
		if *f.from != "" {
			*f.to = *f.from
		}
	}
	if h.SSH.Port != 0 {
		s.Port = h.SSH.Port
	}
	if s.User == "" {
		s.User = "root"
	}
	if s.Port == 0 {
		s.Port = 22
	}
	h.SSH = s
	return h
}

// keyParser is a key that a YAML mapping may contain, and the function that parses and stores its
// value.
type keyParser struct {
	name  string
	parse func(*yaml.Node) error
}

func (p *fileParser) parseFile(top *yaml.Node) error {
	c := &p.cluster
	c.Name = "keelson"
	err := parseMapping("the file", top, []keyParser{
		{"apiVersion", parseText(&p.version, nil, "")},
		{"kind", parseText(&p.kind, nil, "")},
		{"name", parseText(&c.Name, hostName, "small letters, digits and -, 63 at most")},
		{"release", parseText(&c.Release, nil, "")},
		{"init", p.parseInit},
		{"ssh", func(n *yaml.Node) error { return sshKeys(&p.ssh, n, false) }},
		{"controlplane", parseSettings(&p.controlplane)},
		{"agent", parseSettings(&p.agent)},
		{"hosts", p.parseHosts},
	})
	switch {
	case err != nil:
		return err
	case p.version != APIVersion || p.kind != Kind:
		return fmt.Errorf(", line %d: apiVersion %q, kind %q: this kctl reads apiVersion: %s, kind: %s", top.Line,
			p.version, p.kind, APIVersion, Kind)
	case len(p.hosts) == 0:
		return fmt.Errorf(", line %d: hosts is missing or empty: want the machines of the cluster", top.Line)
	}
	return nil
}

func (p *fileParser) parseInit(n *yaml.Node) error {
	var s Settings
	if err := parseSettings(&s)(n); err != nil {
		return err
	}
	for i := 0; i < len(n.Content); i += 2 { // in the order of the cluster file
		name := n.Content[i].Value
		value := n.Content[i+1].Value
		if s[name].List || !initValue.MatchString(value) {
			return fmt.Errorf(", line %d: init.%s: want one value of letters, digits and ._:/=,@+-[]",
				n.Content[i].Line, name)
		}
		p.cluster.Init = append(p.cluster.Init, "--"+name+"="+value)
	}
	return nil
}

func (p *fileParser) parseHosts(n *yaml.Node) error {
	if n.Kind != yaml.SequenceNode {
		return fmt.Errorf(", line %d: hosts: want a list, each with name, address and roles", n.Line)
	}
	if len(n.Content) > maxHosts {
		return fmt.Errorf(", line %d: hosts: %d of them: a cluster file has at most %d", n.Line,
			len(n.Content), maxHosts)
	}
	for _, below := range n.Content {
		var h Host
		err := parseMapping("hosts", below, []keyParser{
			{"name", parseText(&h.Name, hostName, "small letters, digits and -, 63 at most")},
			{"address", parseText(&h.Address, nil, "")},
			{"roles", parseRoles(&h.Roles)},
			{"labels", parseLabels(&h.Labels)},
			{"taints", parseTaints(&h.Taints)},
			{"ssh", func(n *yaml.Node) error { return sshKeys(&h.SSH, n, true) }},
			{"controlplane", parseSettings(&h.ControlPlane)},
			{"agent", parseSettings(&h.Agent)},
		})
		if err != nil {
			return err
		}
		if h.Name == "" {
			return fmt.Errorf(", line %d: hosts: name is missing", below.Line)
		}
		if _, again := p.lines[h.Name]; !again {
			p.lines[h.Name] = below.Line
		}
		p.hosts = append(p.hosts, h)
	}
	return nil
}

func sshKeys(s *SSH, n *yaml.Node, ofHost bool) error {
	keys := []keyParser{
		{"user", parseText(&s.User, sshName, "the name of a user")},
		{"port", parsePort(&s.Port)},
		{"key", parseText(&s.Key, nil, "")},
		{"knownHosts", parseText(&s.KnownHosts, nil, "")},
	}
	if ofHost {
		keys = append(keys, keyParser{"address", parseText(&s.Address, nil, "")},
			keyParser{"hostKey", parseText(&s.HostKey, nil, "")})
	}
	return parseMapping("ssh", n, keys)
}

// parseMapping parses a YAML mapping: it calls the parser of each key that is present. It returns
// an error for a value that is not a mapping, for an unknown key, and for a key that occurs twice.
// mapping is the name of the mapping in errors.
func parseMapping(mapping string, n *yaml.Node, keys []keyParser) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf(", line %d: %s: want lines of the form 'key: value'", n.Line, mapping)
	}
	seen := map[string]int{}
	for i := 0; i < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		at := slices.IndexFunc(keys, func(k keyParser) bool { return k.name == name.Value })
		if name.Kind != yaml.ScalarNode || at < 0 {
			var all []string
			for _, k := range keys {
				all = append(all, k.name)
			}
			return fmt.Errorf(", line %d: unknown key %s in %s: there are %s", name.Line, quoteBounded(name.Value),
				mapping, strings.Join(all, ", "))
		}
		if first, again := seen[name.Value]; again {
			return fmt.Errorf(", line %d: key %s is there twice: it stands in line %d already", name.Line,
				name.Value, first)
		}
		seen[name.Value] = name.Line
		if err := keys[at].parse(value); err != nil {
			if !strings.HasPrefix(err.Error(), ", line ") {
				err = fmt.Errorf(", line %d: %s: %w", value.Line, name.Value, err)
			}
			return err
		}
	}
	return nil
}

// parseText returns a parser that stores a text of one line in *target. The text must not be empty.
// It must match form, unless form is nil. formText describes form in errors.
func parseText(target *string, form *regexp.Regexp, formText string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		switch {
		case n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Value == "":
			return errors.New("want a text")
		case len(n.Value) > maxText:
			return fmt.Errorf("%d bytes: want %d at most", len(n.Value), maxText)
		case form != nil && !form.MatchString(n.Value):
			return fmt.Errorf("%s: want %s", quoteBounded(n.Value), formText)
		case strings.ContainsAny(n.Value, "\x00\n\r"):
			return fmt.Errorf("%s: want one line", quoteBounded(n.Value))
		}
		*target = n.Value
		return nil
	}
}

func parsePort(to *int) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		v, err := strconv.ParseUint(n.Value, 10, 16)
		if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil || v == 0 {
			return fmt.Errorf("%s: want a port, 1 to 65535", quoteBounded(n.Value))
		}
		*to = int(v)
		return nil
	}
}

func parseRoles(to *[]Role) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.SequenceNode {
			return errors.New("want a list of controlplane, standby and worker, such as [controlplane]")
		}
		for _, below := range n.Content {
			r := Role(below.Value)
			if r != ControlPlane && r != Standby && r != Worker || slices.Contains(*to, r) {
				return fmt.Errorf("%s: want controlplane, standby or worker, each once", quoteBounded(below.Value))
			}
			*to = append(*to, r)
		}
		return nil
	}
}

// machineLabels are the labels that the agent always sets on its Node. A cluster file must not set
// them.
var machineLabels = []string{"kubernetes.io/hostname", "kubernetes.io/os", "kubernetes.io/arch"}

func parseLabels(to *map[string]string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.MappingNode {
			return errors.New("want lines of the form 'key: value'")
		}
		*to = map[string]string{}
		for i := 0; i < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if v.Kind != yaml.ScalarNode || v.Tag == "!!null" || !labelKey.MatchString(k.Value) ||
				!labelText.MatchString(v.Value) {
				return fmt.Errorf("%s: %s is no label of a node (a number or a truth value goes in quotes)",
					quoteBounded(k.Value), quoteBounded(v.Value))
			}
			if _, again := (*to)[k.Value]; again {
				return fmt.Errorf("%s is there twice", quoteBounded(k.Value))
			}
			if slices.Contains(machineLabels, k.Value) {
				return fmt.Errorf("%s is set by the agent", k.Value)
			}
			(*to)[k.Value] = v.Value
		}
		return nil
	}
}

func parseTaints(to *[]string) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.SequenceNode {
			return errors.New("want a list of KEY[=VALUE]:EFFECT")
		}
		seen := map[string]bool{} // by key and effect, concatenated
		for _, below := range n.Content {
			m := taintForm.FindStringSubmatch(below.Value)
			if m == nil || !labelKey.MatchString(m[1]) || !labelText.MatchString(m[2]) || seen[m[1]+m[3]] {
				return fmt.Errorf("%s: want KEY[=VALUE]:EFFECT, each key once with an effect; effects are NoSchedule, "+
					"PreferNoSchedule and NoExecute", quoteBounded(below.Value))
			}
			seen[m[1]+m[3]] = true
			*to = append(*to, below.Value)
		}
		return nil
	}
}

// parseSettings returns a parser that stores the settings of a daemon in *target. It does not check
// whether the daemon has these settings. The daemon checks them before they are installed on a
// machine.
func parseSettings(target *Settings) func(*yaml.Node) error {
	return func(n *yaml.Node) error {
		if n.Kind != yaml.MappingNode {
			return errors.New("want lines of the form 'key: value', as the daemon's own file has them")
		}
		*target = Settings{}
		for i := 0; i < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if !flagName.MatchString(k.Value) {
				return fmt.Errorf(", line %d: %s is no key of a daemon's settings", k.Line, quoteBounded(k.Value))
			}
			if from, ok := derivedSettings[k.Value]; ok {
				return fmt.Errorf(", line %d: %s does not stand here: it comes from %s", k.Line, k.Value, from)
			}
			if _, again := (*target)[k.Value]; again {
				return fmt.Errorf(", line %d: key %s is there twice", k.Line, k.Value)
			}
			value, err := parseValue(v)
			if err != nil {
				return fmt.Errorf(", line %d: %s: %w", v.Line, k.Value, err)
			}
			(*target)[k.Value] = value
		}
		return nil
	}
}

func parseValue(n *yaml.Node) (Value, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		one, err := parseScalar(n)
		return Value{Text: []string{one}}, err
	case yaml.SequenceNode:
		v := Value{List: true}
		for _, below := range n.Content {
			one, err := parseScalar(below)
			if err != nil {
				return Value{}, err
			}
			v.Text = append(v.Text, one)
		}
		return v, nil
	}
	return Value{}, errors.New("want a value or a list of values")
}

// parseScalar returns the value of a scalar as YAML: numbers and booleans unchanged, and strings
// quoted. A quoted "1" therefore remains a string.
func parseScalar(n *yaml.Node) (string, error) {
	var s string
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return "", errors.New("want a value (to have the default, leave the key out)")
	}
	if err := parseText(&s, nil, "")(n); err != nil && n.Value != "" {
		return "", err
	}
	switch n.Tag {
	case "!!int", "!!bool", "!!float":
		return n.Value, nil
	}
	return strconv.Quote(n.Value), nil
}

// quoteBounded quotes a text for an error. It cuts a text of more than 64 bytes.
func quoteBounded(s string) string {
	if len(s) > 64 {
		return fmt.Sprintf("%.64q...", s)
	}
	return fmt.Sprintf("%q", s)
}

func isURL(s string) bool { return strings.HasPrefix(s, "https://") || strings.HasPrefix(s, "http://") }
