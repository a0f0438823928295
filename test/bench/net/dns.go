package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"

	agentdns "keelson.dev/keelson/agent/dns"
)

type dnsOptions struct {
	reference, json   string
	services, clients int
	rounds            int
	duration          time.Duration
}

// corefile is the CoreDNS configuration. Keelson's agent has the same, except for the API's
// address.
const corefile = `.:%d {
    bind 127.0.0.1
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        endpoint %s
        pods insecure
        ttl 30
    }
    cache 30
    loadbalance
}
`

// serveDNS runs the measured process: the agent's DNS server alone, on loopback, with as many
// Services as CoreDNS serves.
func serveDNS(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("serve-dns", flag.ContinueOnError)
	port, n := fs.Uint("port", 0, "port"), fs.Int("services", 0, "Services")
	dir := fs.String("dir", "", "folder")
	if err := fs.Parse(args); err != nil {
		return err
	}
	objects := fake.NewCluster()
	for _, o := range newDNSCluster(*n).objects() {
		objects.Put(o)
	}
	resolv := filepath.Join(*dir, "resolv.conf") // empty: queries are not forwarded
	if err := os.WriteFile(resolv, nil, 0o644); err != nil {
		return err
	}
	s := agentdns.New(agentdns.Config{Node: "bench", StateDir: *dir, RunDir: *dir, ResolvConf: resolv,
		Log:  slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Port: uint16(*port), Addresses: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	return s.Run(ctx, objects, objects)
}

// benchDNS measures the agent's DNS server and CoreDNS in turn under the same load, and prints a
// table.
func benchDNS(ctx context.Context, args []string) (err error) {
	var o dnsOptions
	fs := flag.NewFlagSet("dns", flag.ContinueOnError)
	fs.StringVar(&o.reference, "coredns", "",
		"program that runs CoreDNS, the reference (test/bench/coredns); empty = no reference")
	fs.StringVar(&o.json, "json", "bench.json", "write JSON lines to this file")
	fs.IntVar(&o.services, "services", 1000, "Services of the cluster, a tenth of them headless with 3 endpoints")
	fs.IntVar(&o.clients, "clients", 32,
		"clients; each sends its next query when the response to the previous query has arrived")
	fs.IntVar(&o.rounds, "rounds", 3, "rounds; each round measures both servers")
	fs.DurationVar(&o.duration, "duration", 3*time.Second, "duration of each measurement")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.services < 10 || o.clients < 1 || o.rounds < 1 || o.duration <= 0 {
		return errors.New("-services must be at least 10; -clients, -rounds and -duration must be above zero")
	}
	dir, err := os.MkdirTemp("", "bench-dns-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	c := newDNSCluster(o.services)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ours, err := startServer(ctx, "keelson", dir, func(port int) (*exec.Cmd, error) {
		return exec.CommandContext(ctx, self, "serve-dns", "-port", strconv.Itoa(port), "-services",
			strconv.Itoa(o.services), "-dir", dir), nil
	})
	if err != nil {
		return err
	}
	servers := []*server{ours}
	stop := func() {
		for _, s := range servers {
			s.stop()
		}
		servers = nil
	}
	defer stop()
	if o.reference != "" {
		api, err := startAPI(c)
		if err != nil {
			return err
		}
		defer func() {
			stop()                       // else CoreDNS would start new watches, and Close waits for all
			api.CloseClientConnections() // watches never end by themselves
			api.Close()
		}()
		s, err := startServer(ctx, "CoreDNS", dir, func(port int) (*exec.Cmd, error) {
			file := filepath.Join(dir, "Corefile")
			return exec.CommandContext(ctx, o.reference, "-conf", file, "-dns.port", strconv.Itoa(port)),
				os.WriteFile(file, fmt.Appendf(nil, corefile, port, api.URL), 0o644)
		})
		if err != nil {
			return err
		}
		servers = append(servers, s)
	}
	return o.measureServers(ctx, c, servers)
}

// server is a process of one of the compared programs.
type server struct {
	name, at string
	cmd      *exec.Cmd
	log      *os.File
	runs     []dnsRun
}

// startServer starts a program and waits until it resolves a Service.
func startServer(ctx context.Context, name, dir string, command func(port int) (*exec.Cmd, error)) (*server, error) {
	l, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.LocalAddr().(*net.UDPAddr).Port
	l.Close()
	cmd, err := command(port)
	if err != nil {
		return nil, err
	}
	s := &server{name: name, at: fmt.Sprintf("127.0.0.1:%d", port), cmd: cmd}
	if s.log, err = os.Create(filepath.Join(dir, name+".log")); err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	m := &dns.Msg{}
	m.SetQuestion("s1.default.svc.cluster.local.", dns.TypeA)
	err = wait.For(limit, 50*time.Millisecond, func() error {
		out, err := dns.Exchange(m, s.at)
		if err == nil && len(out.Answer) != 1 {
			err = errors.New(dns.RcodeToString[out.Rcode])
		}
		return err
	})
	if err != nil {
		s.stop()
		raw, _ := os.ReadFile(s.log.Name())
		return nil, fmt.Errorf("%s does not resolve a Service: %w\n%s", name, err, raw)
	}
	return s, nil
}

func (s *server) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait() // an error is expected: it was killed
	s.log.Close()
}

// dnsRun is one measurement of one server.
type dnsRun struct {
	perSecond, perCore float64
	p50, p99           float64 // milliseconds
	wrong, lost        int
}

// measureServers runs the load on each server in each round and prints the medians.
func (o dnsOptions) measureServers(ctx context.Context, c dnsCluster, servers []*server) error {
	var records []figures.Record
	for range o.rounds {
		for _, s := range servers {
			r, rec, err := o.measureServer(ctx, c, s)
			if err != nil {
				return err
			}
			s.runs = append(s.runs, r)
			records = append(records, rec)
		}
	}
	f, err := os.Create(o.json)
	if err != nil {
		return fmt.Errorf("-json: %w", err)
	}
	defer f.Close()
	if err := figures.WriteLines(f, records); err != nil {
		return err
	}
	var rows []figures.Row
	for _, v := range []struct {
		measure, unit, key string
		of                 func(dnsRun) float64
	}{
		{"DNS, queries per second of the server's CPU time", "/s", "dns per core", func(r dnsRun) float64 {
			return r.perCore
		}},
		{"DNS, queries per second", "/s", "dns rate", func(r dnsRun) float64 { return r.perSecond }},
		{"DNS, median response time", "ms", "", func(r dnsRun) float64 { return r.p50 }},
		{"DNS, 99th percentile of the response time", "ms", "dns p99_ms", func(r dnsRun) float64 { return r.p99 }},
		{"DNS, anonymous memory of the server", "MiB", "", nil},
	} {
		row := figures.Row{Measure: v.measure, Unit: v.unit, Key: v.key,
			Note: fmt.Sprintf("%d Services, %d clients", o.services, o.clients)}
		for i, s := range servers {
			figure := 0.0
			if v.of != nil {
				figure = medianOf(s.runs, v.of)
			} else if mem, err := procfs.ReadMemory(s.cmd.Process.Pid); err == nil {
				figure = mem.Anonymous / (1 << 20)
			}
			if i == 0 {
				row.Figure = figure
			} else {
				row.Reference = &figures.Reference{Name: s.name, Figure: figure}
			}
		}
		rows = append(rows, row)
	}
	for _, s := range servers {
		for _, r := range s.runs {
			if r.wrong > 0 || r.lost > 0 {
				fmt.Fprintf(os.Stderr, "%s: %d wrong responses, %d queries without a response\n", s.name,
					r.wrong, r.lost)
			}
		}
	}
	return figures.Print(os.Stdout, rows)
}

func medianOf(runs []dnsRun, of func(dnsRun) float64) float64 {
	var all []float64
	for _, r := range runs {
		all = append(all, of(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// measureServer runs all clients against one server for o.duration.
func (o dnsOptions) measureServer(ctx context.Context, c dnsCluster, s *server) (dnsRun, figures.Record, error) {
	rec := figures.Record{Measure: "dns", Params: map[string]any{"server": s.name, "services": o.services,
		"clients": o.clients}, CPU: map[string]float64{}}
	meter := procfs.Meter{Processes: map[string]int{s.name: s.cmd.Process.Pid}, Whole: []string{s.name}}
	var r dnsRun
	var times []float64
	err := meter.Run(&rec, func() error {
		var mu sync.Mutex
		var all sync.WaitGroup
		var failed error
		end := time.Now().Add(o.duration)
		for range o.clients {
			all.Go(func() {
				took, wrong, lost, err := runClient(ctx, c, s.at, end)
				mu.Lock()
				defer mu.Unlock()
				times, r.wrong, r.lost, failed = append(times, took...), r.wrong+wrong, r.lost+lost,
					errors.Join(failed, err)
			})
		}
		all.Wait()
		return failed
	})
	if err != nil {
		return r, rec, fmt.Errorf("%s: %w", s.name, err)
	}
	slices.Sort(times)
	n := float64(len(times))
	r.perSecond, r.perCore = n/o.duration.Seconds(), n/rec.CPU[s.name]
	r.p50, r.p99 = times[len(times)/2], times[len(times)*99/100]
	rec.Values = map[string]float64{"per_second": r.perSecond, "per_core": r.perCore, "p50_ms": r.p50, "p99_ms": r.p99,
		"wrong": float64(r.wrong), "lost": float64(r.lost)}
	return r, rec, nil
}

// runClient sends queries to the server at address from one socket, one after the other, until end.
// took is in milliseconds; lost counts queries without a response within 2 seconds.
func runClient(ctx context.Context, c dnsCluster, address string, end time.Time) (
	took []float64, wrong, lost int, err error,
) {
	conn, err := net.Dial("udp", address)
	if err != nil {
		return nil, 0, 0, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	buf := make([]byte, 4096)
	rnd := rand.New(rand.NewPCG(rand.Uint64(), 1))
	for id := uint16(1); time.Now().Before(end); id++ {
		q := c.queries[rnd.IntN(len(c.queries))]
		packet := append([]byte{byte(id >> 8), byte(id)}, q.packet[2:]...)
		began := time.Now()
		if err := conn.SetDeadline(began.Add(2 * time.Second)); err != nil {
			return took, wrong, lost, err
		}
		if _, err := conn.Write(packet); err != nil {
			return took, wrong, lost, err
		}
		n, err := conn.Read(buf)
		if err != nil {
			if ctx.Err() != nil {
				return took, wrong, lost, ctx.Err()
			}
			lost++
			continue
		}
		took = append(took, float64(time.Since(began).Microseconds())/1000)
		// ID, response code and number of answers suffice to detect a wrong response
		if n < 12 || !bytes.Equal(buf[:2], packet[:2]) || int(buf[3]&0xf) != q.rcode || int(buf[7]) != q.answers {
			wrong++
		}
	}
	return took, wrong, lost, nil
}
